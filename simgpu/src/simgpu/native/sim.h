// What the stand-ins share: the state of the simulated GPUs, which libcuda.so.1 holds.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>

// Errors have the same numbers in the driver's API and in the runtime's.
enum SimError {
  SIM_OK = 0,
  SIM_INVALID_VALUE = 1,
  SIM_OUT_OF_MEMORY = 2,
  SIM_NO_DEVICE = 100,
  SIM_INVALID_DEVICE = 101,
  SIM_INVALID_HANDLE = 400,
  SIM_NOT_FOUND = 500,
  SIM_NOT_READY = 600,
  SIM_ILLEGAL_ADDRESS = 700,
  SIM_ALREADY_PINNED = 712,
  SIM_NOT_PINNED = 713,
  SIM_LAUNCH_FAILED = 719,
  SIM_NOT_SUPPORTED = 801,
  SIM_CAPTURING = 900,
  SIM_CAPTURE_FAILED = 901,
  SIM_UNMATCHED = 903,
  SIM_UNJOINED = 904,
  SIM_ISOLATION = 905,
};

extern "C" {

// --- settings, errors and counts (state.cpp)

int simgpu_devices();
int simgpu_arch();  // 90 for sm_90
size_t simgpu_capacity();
int simgpu_multiprocessors();
int simgpu_attribute(int which);  // numbered as CUdevice_attribute
/// Says on stderr what went wrong and returns `code`.
int simgpu_fail(int code, const char* format, ...) __attribute__((format(printf, 2, 3)));
const char* simgpu_error_text(int code);
const char* simgpu_last_failure();  // what this thread has said on stderr last
void simgpu_count(const char* name);
/// A number for the lines of Python that the thread is at, 0 if there are none; notes a wait there.
/// Not with a lock held, for which somebody may wait who has Python's.
int simgpu_where(bool waits);
const char* simgpu_where_text(int where);
/// What a generated stub does: an entry that nobody has written yet fails with its name.
int simgpu_missing(const char* library, const char* name, int code);

// --- devices and memory (memory.cpp)

int simgpu_current_device();
int simgpu_set_device(int device);
size_t simgpu_used(int device);
int simgpu_allocate(size_t bytes, void** out);  // on the current device
int simgpu_release(void* pointer);
int simgpu_owner(const void* pointer);    // the device of an address, -1 for memory of the host
char* simgpu_host(const void* pointer);   // where the host may touch what is at a device address
int simgpu_allocation(const void* pointer, void** base, size_t* bytes);
int simgpu_inside(const void* pointer, size_t bytes, const char* what);  // an error code, if it is not live
int simgpu_pin(void* pointer, size_t bytes);
int simgpu_unpin(void* pointer);
int simgpu_pinned(const void* pointer);
/// Blocks as torch's allocator hands them out; those of a pool are its graphs' to use again.
void simgpu_note_block(uintptr_t address, size_t bytes, bool of_pool);
void simgpu_drop_block(uintptr_t address);
int simgpu_block(const void* pointer, uintptr_t* base, size_t* bytes);

// --- streams and events (stream.cpp)

void* simgpu_new_stream(int priority, bool blocking);
int simgpu_free_stream(void* stream);
int simgpu_stream_device(void* stream);
int simgpu_stream_priority(void* stream);
int simgpu_finish(void* stream);  // brings what is on its way; for the host that is no wait
int simgpu_synchronize(void* stream, bool only_asks);
int simgpu_synchronize_device();
void* simgpu_new_event();
void simgpu_record(void* event, void* stream);
int simgpu_stream_wait(void* stream, void* event);
int simgpu_event_wait(void* event);  // asks for no line: PyTorch's allocator waits with its lock held
int simgpu_event_ready(void* event);
int simgpu_tell();  // other threads rely on what this one has asked
int simgpu_elapsed(float* ms, void* begin, void* end);
int simgpu_copy(void* to, const void* from, size_t bytes, void* stream, bool asynchronous);
int simgpu_fill(void* to, unsigned value, int width, size_t count, void* stream);

// --- what work does to memory, and whether it is ordered (order.cpp)

enum SimAccess { SIM_READS, SIM_WRITES, SIM_COVERS };  // the last: writes parts, which are not told
struct SimRange {
  const void* at;
  size_t bytes;
  int64_t access;
};
/// Notes work on a stream; an error code if other streams use the memory, in no order with it.
int simgpu_work(void* stream, const char* name, const SimRange* ranges, int n);
/// An error code if a part of the memory was not written since PyTorch's allocator gave it out.
int simgpu_written(const void* at, size_t bytes, const char* name);
void simgpu_given_out(uintptr_t at, size_t bytes);
void simgpu_given_back(uintptr_t at, size_t bytes);
void simgpu_forget(uintptr_t at, size_t bytes);

// --- the trace (trace.cpp)

/// Bytes that work reads and writes, each once, and the multiplications of its matrix products.
struct SimWeight {
  double read, written, multiply_adds;
};
/// Says the weight of this thread's next work, of which otherwise the ranges are counted.
void simgpu_weigh(SimWeight weight);
void simgpu_note_traced(void* stream, const char* name, const SimRange* ranges, int n);

// --- kernels (driver.cpp)

/// A launch as Python sees it.
struct SimLaunch {
  const char* ptx;
  const char* name;
  unsigned grid[3], block[3], shared;
  void** params;
  void* stream;
};

}  // extern "C"

/// An entry of an API: counts its calls, and fails when SIMGPU_FAIL names it (state.cpp).
class SimEntry {
 public:
  explicit SimEntry(const char* name);
  int enter();

 private:
  const char* name;
  std::atomic<long>* calls;
  long failing = 0;
  int code = SIM_LAUNCH_FAILED;
};

/// The first thing in an entry of an API.
#define SIM_ENTER(result)                                \
  do {                                                   \
    static SimEntry entry(__func__);                     \
    if (int code = entry.enter()) return (result)(code); \
  } while (0)
