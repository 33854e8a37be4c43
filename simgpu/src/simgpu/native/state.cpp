// Settings, errors, counts, and calls that are made to fail.
#include <cuda.h>

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <string>

#include "sim.h"

namespace {

long setting(const char* name, long otherwise) {
  const char* text = getenv(name);
  return text && *text ? strtol(text, nullptr, 10) : otherwise;
}

// Never destroyed: other libraries call until the very end of the process.
std::mutex& mutex() {
  static auto* it = new std::mutex;
  return *it;
}
std::map<std::string, std::atomic<long>>& counts() {
  static auto* it = new std::map<std::string, std::atomic<long>>;
  return *it;
}
std::atomic<long>* counter(const std::string& name) {
  std::lock_guard lock(mutex());
  return &counts()[name];
}

/// How many of `all` devices CUDA_VISIBLE_DEVICES shows: they are alike, so the number says it all.
int visible(int all) {
  const char* list = getenv("CUDA_VISIBLE_DEVICES");
  if (!list) return all;
  int n = 0;
  for (char* end; *list; list = *end ? end + 1 : end) {
    long device = strtol(list, &end, 10);
    if (end == list || device < 0 || device >= all) break;  // what follows is hidden, too
    ++n;
  }
  return n;
}

/// Bytes of shared memory that a thread block may ask for.
int shared_memory() {
  int arch = simgpu_arch();
  if (arch == 80 || arch == 87) return 163 << 10;
  return arch / 10 == 9 || arch / 10 == 10 ? 227 << 10 : 99 << 10;
}

thread_local std::string said;

}  // namespace

/// An entry's name as programs write it: the driver's header adds a version to some.
static const char* plain(const char* name) {
  size_t n = strlen(name);
  return n > 3 && !strncmp(name + n - 3, "_v", 2) ? strndup(name, n - 3) : name;
}

SimEntry::SimEntry(const char* function) : name(plain(function)), calls(counter(name)) {
  // SIMGPU_FAIL is NAME:N or NAME:N:CODE, several with commas between: the N-th call from 1
  std::string all = getenv("SIMGPU_FAIL") ? getenv("SIMGPU_FAIL") : "";
  for (size_t at = 0; at < all.size();) {
    size_t end = std::min(all.find(',', at), all.size());
    std::string one = all.substr(at, end - at);
    size_t colon = one.find(':'), second = one.find(':', colon + 1);
    if (one.substr(0, colon) == name) {
      if (strstr(name, "Malloc") || strstr(name, "Alloc")) code = SIM_OUT_OF_MEMORY;
      failing = colon == std::string::npos ? 1 : strtol(one.c_str() + colon + 1, nullptr, 10);
      if (second != std::string::npos) code = (int)strtol(one.c_str() + second + 1, nullptr, 10);
    }
    at = end + 1;
  }
}

int SimEntry::enter() {
  if (calls->fetch_add(1) + 1 != failing) return SIM_OK;
  return simgpu_fail(code, "call %ld of %s fails, as SIMGPU_FAIL asks for", failing, name);
}

extern "C" {

int simgpu_devices() {
  static int n = visible((int)setting("SIMGPU_GPUS", 1));
  return n;
}
int simgpu_arch() {
  static int arch = (int)setting("SIMGPU_ARCH", 90);
  return arch;
}
size_t simgpu_capacity() {
  static size_t bytes = (size_t)setting("SIMGPU_MEMORY", 2l << 30);
  return bytes;
}
int simgpu_multiprocessors() {
  return simgpu_arch() == 80 ? 108 : simgpu_arch() / 10 == 10 ? 148 : 132;
}

int simgpu_fail(int code, const char* format, ...) {
  char text[4096];
  va_list args;
  va_start(args, format);
  vsnprintf(text, sizeof text, format, args);
  va_end(args);
  fprintf(stderr, "simgpu: %s\n", text);
  said = text;
  return code;
}
const char* simgpu_last_failure() { return said.c_str(); }

static int (*here)(int) = nullptr;
static auto& places = *new std::deque<std::string>{"(no Python)"};
void simgpu_set_lines(int (*number)(int)) { here = number; }
void simgpu_note_place(const char* text) {
  std::lock_guard lock(mutex());
  places.emplace_back(text);
}
int simgpu_where(bool waits) { return here ? here(waits) : 0; }
const char* simgpu_where_text(int where) {
  std::lock_guard lock(mutex());
  return places[where].c_str();
}

const char* simgpu_error_text(int code) {
  switch (code) {
    case SIM_OK: return "no error";
    case SIM_INVALID_VALUE: return "invalid argument";
    case SIM_OUT_OF_MEMORY: return "out of memory";
    case SIM_NO_DEVICE: return "no CUDA-capable device is detected";
    case SIM_INVALID_DEVICE: return "invalid device ordinal";
    case SIM_INVALID_HANDLE: return "invalid resource handle";
    case SIM_NOT_FOUND: return "named symbol not found";
    case SIM_NOT_READY: return "device not ready";
    case SIM_ILLEGAL_ADDRESS: return "an illegal memory access was encountered";
    case SIM_ALREADY_PINNED: return "part or all of the requested memory range is already mapped";
    case SIM_NOT_PINNED: return "pointer does not correspond to a registered memory region";
    case SIM_LAUNCH_FAILED: return "unspecified launch failure";
    case SIM_NOT_SUPPORTED: return "operation not supported";
    case SIM_CAPTURING: return "operation not permitted when stream is capturing";
    case SIM_CAPTURE_FAILED: return "operation failed due to a previous error during capture";
    case SIM_UNMATCHED: return "capture was not initiated in this stream";
    case SIM_UNJOINED: return "capturing stream has unjoined work";
    case SIM_ISOLATION: return "dependency created on uncaptured work in another stream";
  }
  static thread_local char other[32];
  snprintf(other, sizeof other, "CUDA error %d", code);
  return other;
}

void simgpu_count(const char* name) { counter(name)->fetch_add(1); }

/// Calls `each`, which is Python's, with every count so far.
void simgpu_each_count(void (*each)(const char* name, long n)) {
  std::map<const char*, long> now;  // who has Python's lock may wait for ours
  {
    std::lock_guard lock(mutex());
    for (auto& [name, n] : counts()) now[name.c_str()] = n;
  }
  for (auto [name, n] : now) each(name, n);
}

int simgpu_missing(const char* library, const char* name, int code) {
  static auto* said = new std::set<std::string>;
  simgpu_count(name);
  std::lock_guard lock(mutex());
  if (!said->insert(name).second) return code;
  return simgpu_fail(code, "%s of %s is not simulated", name, library);
}

int simgpu_attribute(int which) {
  int shared = shared_memory();
  switch (which) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: return simgpu_arch() / 10;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: return simgpu_arch() % 10;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: return simgpu_multiprocessors();
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE: return 32;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X:
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y: return 1024;
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z: return 64;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X: return 0x7FFFFFFF;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y:
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z: return 0xFFFF;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR: return 2048;
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR: return 32;
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK:
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR:
    case CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY: return 1 << 16;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK: return 48 << 10;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: return shared;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: return shared + 1024;
    case CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK: return 1024;
    case CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE: return 50 << 20;
    case CU_DEVICE_ATTRIBUTE_CLOCK_RATE: return 1'980'000;
    case CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE: return 2'619'000;
    case CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH: return 5120;
    case CU_DEVICE_ATTRIBUTE_TEXTURE_ALIGNMENT: return 512;
    case CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT: return 3;
    case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
    case CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY:
    case CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM:
    case CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS:
    case CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED: return 1;
  }
  return 0;  // what is not listed, these devices do not have
}

}  // extern "C"
