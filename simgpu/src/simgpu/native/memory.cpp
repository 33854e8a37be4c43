// The memory of the simulated devices, and the host's pinned memory.
//
// A device is one sparse file that is mapped twice. Its addresses lie in a window that no code of the
// host may touch: a pointer that is mixed up faults at once. The executor of kernels and the CPU's
// operators use the other mapping. What was freed and never written holds NaN in every float type.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>

#include "graph.h"
#include "order.h"

namespace {

constexpr int MOST_DEVICES = 16;
constexpr size_t APART = 1ull << 38;  // between windows: an address tells its device
constexpr uintptr_t FIRST = 0x300000000000;  // neither the heap nor libraries come near it
constexpr size_t GAP = 512;  // after each allocation: what runs over its end hits nothing

struct Device {
  char* window = nullptr;
  char* view = nullptr;
  int file = -1;
  size_t used = 0;
  std::map<size_t, size_t> taken;  // offset -> bytes, the gap not counted
};

struct Memory {
  std::recursive_mutex mutex;
  Device devices[MOST_DEVICES];
  std::map<uintptr_t, size_t> pinned, blocks;
  std::map<uintptr_t, unsigned long> lasting;  // blocks outside of pools -> their number
  unsigned long given_out = 0;
  std::set<void*> divided;  // allocations that torch's allocator hands out in blocks
  std::set<void*> pools;    // as well, of a pool: its graphs use a block after it is freed, too
};
Memory& memory() {
  static auto* it = new Memory;
  return *it;
}
thread_local int current = 0;

/// Bytes of a window: more than there is memory, so that gaps and holes between allocations cost none.
size_t room() { return 2 * simgpu_capacity(); }

Device& device(int number) {
  Lock lock(memory().mutex);
  Device& d = memory().devices[number];
  if (d.window) return d;
  size_t bytes = room();
  void* at = (void*)(FIRST + number * APART);
  d.file = memfd_create("simgpu", MFD_CLOEXEC);
  bool made = d.file >= 0 && !ftruncate(d.file, (off_t)bytes);
  int fixed = MAP_SHARED | MAP_NORESERVE | MAP_FIXED_NOREPLACE;
  d.window = (char*)mmap(at, bytes, PROT_NONE, fixed, d.file, 0);
  d.view = (char*)mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, d.file, 0);
  if (!made || d.window != at || d.view == MAP_FAILED) {
    simgpu_fail(0, "no address space for %zu bytes of device memory", bytes);
    abort();
  }
  return d;
}

/// The entry of a map of address -> bytes around an address, else its end.
template <class Map>
typename Map::iterator around(Map& map, typename Map::key_type address) {
  auto it = map.upper_bound(address);
  if (it == map.begin()) return map.end();
  --it;
  return address < it->first + it->second ? it : map.end();
}

}  // namespace

std::map<uintptr_t, std::vector<char>> simgpu_contents() {
  Lock lock(memory().mutex);
  std::map<uintptr_t, std::vector<char>> all;
  for (Device& d : memory().devices)
    for (auto& [at, bytes] : d.taken) all[(uintptr_t)d.window + at].assign(d.view + at, d.view + at + bytes);
  return all;
}
void simgpu_restore(const std::map<uintptr_t, std::vector<char>>& contents) {
  Lock lock(memory().mutex);
  for (Device& d : memory().devices)
    for (auto& [at, bytes] : d.taken) {
      auto it = contents.find((uintptr_t)d.window + at);
      if (it == contents.end()) memset(d.view + at, 0xFF, bytes);
      else memcpy(d.view + at, it->second.data(), std::min(bytes, it->second.size()));
    }
}
unsigned long simgpu_blocks() { return memory().given_out; }
uintptr_t simgpu_lasting_block(const void* pointer, unsigned long* number) {
  Lock lock(memory().mutex);
  auto it = around(memory().blocks, (uintptr_t)pointer);
  if (it == memory().blocks.end() || !memory().lasting.count(it->first)) return 0;
  *number = memory().lasting[it->first];
  return it->first;
}

extern "C" {

int simgpu_current_device() { return current; }
int simgpu_set_device(int number) {
  if (number < 0 || number >= simgpu_devices()) return SIM_INVALID_DEVICE;
  current = number;
  return SIM_OK;
}
size_t simgpu_used(int number) { return device(number).used; }

int simgpu_allocate(size_t bytes, void** out) {
  Lock lock(memory().mutex);
  Device& d = device(current);
  size_t round = bytes >= 1 << 21 ? 1 << 21 : 512, at = 0;
  bytes = bytes ? bytes : 1;
  for (auto& [offset, size] : d.taken) {  // the first hole that is large enough
    if (at + bytes + GAP <= offset) break;
    at = (offset + size + GAP + round - 1) / round * round;
  }
  if (at + bytes > room() || d.used + bytes > simgpu_capacity()) return SIM_OUT_OF_MEMORY;
  d.taken[at] = bytes;
  d.used += bytes;
  memset(d.view + at, 0xFF, bytes);
  *out = d.window + at;
  return SIM_OK;
}

int simgpu_release(void* pointer) {
  if (!pointer) return SIM_OK;
  std::unique_lock lock(memory().mutex);
  int number = simgpu_owner(pointer);
  if (number < 0) return simgpu_fail(SIM_INVALID_VALUE, "%p is freed, which is no device memory", pointer);
  Device& d = device(number);
  auto it = d.taken.find((size_t)((char*)pointer - d.window));
  if (it == d.taken.end()) return simgpu_fail(SIM_INVALID_VALUE, "%p is freed, which is not allocated", pointer);
  size_t page = 4096, from = (it->first + page - 1) / page * page, to = (it->first + it->second) / page * page;
  if (to > from) fallocate(d.file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)from, (off_t)(to - from));
  d.used -= it->second;
  memory().divided.erase(pointer);
  memory().pools.erase(pointer);
  size_t bytes = it->second;
  d.taken.erase(it);
  lock.unlock();  // the one of streams comes before it
  simgpu_forget((uintptr_t)pointer, bytes);
  return SIM_OK;
}

int simgpu_owner(const void* pointer) {
  auto address = (uintptr_t)pointer;
  if (address < FIRST || address >= FIRST + MOST_DEVICES * APART) return -1;
  int number = (int)((address - FIRST) / APART);
  return number < simgpu_devices() && (address - FIRST) % APART < room() ? number : -1;
}

char* simgpu_host(const void* pointer) {
  int number = simgpu_owner(pointer);
  if (number < 0) return (char*)pointer;
  Device& d = device(number);
  return d.view + ((char*)pointer - d.window);
}

int simgpu_allocation(const void* pointer, void** base, size_t* bytes) {
  Lock lock(memory().mutex);
  int number = simgpu_owner(pointer);
  if (number < 0) return 0;
  Device& d = device(number);
  auto it = around(d.taken, (size_t)((char*)pointer - d.window));
  if (it == d.taken.end()) return 0;
  *base = d.window + it->first;
  *bytes = it->second;
  return 1;
}

int simgpu_inside(const void* pointer, size_t bytes, const char* what) {
  Lock lock(memory().mutex);
  if (simgpu_owner(pointer) < 0) return SIM_OK;
  uintptr_t base;
  size_t size;
  if (!simgpu_block(pointer, &base, &size)) return simgpu_fail(SIM_ILLEGAL_ADDRESS, "%s uses %p, which was freed or never allocated", what, pointer);
  if ((uintptr_t)pointer + bytes <= base + size) return SIM_OK;
  return simgpu_fail(SIM_ILLEGAL_ADDRESS, "%s of %zu bytes at %p leaves the allocation there", what, bytes, pointer);
}

int simgpu_pin(void* pointer, size_t bytes) {
  Lock lock(memory().mutex);
  return memory().pinned.emplace((uintptr_t)pointer, bytes).second ? SIM_OK : SIM_ALREADY_PINNED;
}
int simgpu_unpin(void* pointer) {
  Lock lock(memory().mutex);
  return memory().pinned.erase((uintptr_t)pointer) ? SIM_OK : SIM_NOT_PINNED;
}
int simgpu_pinned(const void* pointer) {
  Lock lock(memory().mutex);
  return around(memory().pinned, (uintptr_t)pointer) != memory().pinned.end();
}

void simgpu_note_block(uintptr_t address, size_t bytes, bool of_pool) {
  simgpu_given_out(address, bytes);
  Lock lock(memory().mutex);
  if (!of_pool) memset(simgpu_host((void*)address), 0xFF, bytes);
  memory().blocks[address] = bytes;
  if (++memory().given_out; !of_pool) memory().lasting[address] = memory().given_out;
  void* base;
  size_t size;
  if (simgpu_allocation((void*)address, &base, &size)) (of_pool ? memory().pools : memory().divided).insert(base);
}
void simgpu_drop_block(uintptr_t address) {
  std::unique_lock lock(memory().mutex);
  size_t bytes = memory().blocks[address];
  memory().blocks.erase(address);
  memory().lasting.erase(address);
  lock.unlock();
  simgpu_given_back(address, bytes);
}
int simgpu_block(const void* pointer, uintptr_t* base, size_t* bytes) {
  Lock lock(memory().mutex);
  bool whole = simgpu_allocation(pointer, (void**)base, bytes);
  bool pool = whole && memory().pools.count((void*)*base);
  if (!whole || (pool && simgpu_launching())) return whole;
  auto it = around(memory().blocks, (uintptr_t)pointer);
  if (it == memory().blocks.end()) return pool || !memory().divided.count((void*)*base);
  *base = it->first;
  *bytes = it->second;
  return 1;
}

}  // extern "C"
