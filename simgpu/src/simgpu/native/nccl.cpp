// NCCL's collectives between processes of one machine, over shared memory.
//
// A call does its work at once, in the thread that makes it; sums are made in the order of the ranks.
// A rank that has died is noticed: its process is looked for while the others wait.
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <functional>
#include <string>
#include <vector>

#include "sim.h"

namespace {

constexpr size_t SLOT = 1 << 20;  // bytes that travel at a time
constexpr int RANKS = 16;

enum Result { OK = 0, SYSTEM = 2, ARGUMENT = 4, USAGE = 5, REMOTE = 6 };
enum Op { SUM, PRODUCT, MAX, MIN, AVERAGE, OPS };
enum Type { I8, U8, I32, U32, I64, U64, F16, F32, F64, BF16, FP8A, FP8B };

struct Shared {
  std::atomic<int> arrived, aborted;
  std::atomic<unsigned> round;
  std::atomic<int> process[RANKS];
  std::atomic<int> color[RANKS], key[RANKS];                     // of ncclCommSplit
  std::atomic<unsigned long> sent[RANKS][RANKS], taken[RANKS][RANKS];  // messages from, to
};

struct Id { char text[128]; };

struct Comm {
  Shared* shared;
  char* slots;
  std::string path;
  int rank, size, device, splits = 0;
  std::atomic<int> error{OK};

  char* slot(int of) { return slots + of * SLOT; }
  char* mail(int from, int to) { return slots + (size_t)(RANKS + from * size + to) * SLOT; }

  bool broken() {
    if (shared->aborted || error) return true;
    for (int r = 0; r < size; ++r) {
      int process = shared->process[r];
      if (!process || !kill(process, 0) || errno != ESRCH) continue;
      simgpu_fail(0, "rank %d of %d is gone in the middle of a collective", r, size);
      error = REMOTE;
      return true;
    }
    return false;
  }

  /// Waits until every rank is here.
  bool meet() {
    unsigned round = shared->round;
    if (shared->arrived.fetch_add(1) + 1 == size) {
      shared->arrived = 0;
      ++shared->round;
      return true;
    }
    for (long i = 1; shared->round == round; ++i) {
      if (i > 200) usleep(50);
      else sched_yield();
      if (i % 1000 == 0 && broken()) return false;
    }
    return true;
  }
};

size_t width(int type) {
  static const size_t bytes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
  return bytes[type];
}

struct Half {
  using Wide = float;
  _Float16 bits;
  operator float() const { return (float)bits; }
  Half& operator=(float x) { return bits = (_Float16)x, *this; }
};
struct BFloat {
  using Wide = float;
  uint16_t bits;
  operator float() const {
    uint32_t whole = (uint32_t)bits << 16;
    float x;
    return memcpy(&x, &whole, 4), x;
  }
  BFloat& operator=(float x) {
    uint32_t whole;
    memcpy(&whole, &x, 4);
    bits = x != x ? 0x7FFF : (uint16_t)((whole + 0x7FFF + (whole >> 16 & 1)) >> 16);
    return *this;
  }
};

/// Reduces what all ranks have put into their slots; 16 bits are summed in float.
template <class T, class Wide>
void reduce_as(Comm* c, void* out, size_t n, int op) {
  for (size_t i = 0; i < n; ++i) {
    Wide all = (Wide)((T*)c->slot(0))[i];
    for (int r = 1; r < c->size; ++r) {
      Wide next = (Wide)((T*)c->slot(r))[i];
      switch (op) {
        case PRODUCT: all = all * next; break;
        case MAX: all = std::max(all, next); break;
        case MIN: all = std::min(all, next); break;
        default: all = all + next;
      }
    }
    ((T*)out)[i] = op == AVERAGE ? all / (Wide)c->size : all;
  }
}

int reduce(Comm* c, void* out, size_t n, int type, int op) {
  if (op >= OPS) return simgpu_fail(USAGE, "NCCL's reduction %d is not simulated", op);
  switch (type) {
    case I8: reduce_as<int8_t, int8_t>(c, out, n, op); return OK;
    case U8: reduce_as<uint8_t, uint8_t>(c, out, n, op); return OK;
    case I32: reduce_as<int32_t, int32_t>(c, out, n, op); return OK;
    case U32: reduce_as<uint32_t, uint32_t>(c, out, n, op); return OK;
    case I64: reduce_as<int64_t, int64_t>(c, out, n, op); return OK;
    case U64: reduce_as<uint64_t, uint64_t>(c, out, n, op); return OK;
    case F16: reduce_as<Half, float>(c, out, n, op); return OK;
    case F32: reduce_as<float, float>(c, out, n, op); return OK;
    case F64: reduce_as<double, double>(c, out, n, op); return OK;
    case BF16: reduce_as<BFloat, float>(c, out, n, op); return OK;
  }
  return simgpu_fail(ARGUMENT, "NCCL's reduction of type %d is not simulated", type);
}

// Between ncclGroupStart and ncclGroupEnd calls only say what is to be done.
thread_local int depth = 0;
thread_local std::vector<std::function<int()>> queued;

int do_or_queue(void* stream, std::function<int()> work) {
  simgpu_count("collective");
  if (simgpu_finish(stream)) return SYSTEM;
  if (!depth) return work();
  queued.push_back(std::move(work));
  return OK;
}

/// Calls `work` with (offset, bytes) for parts of at most a slot, all ranks meeting before and after it.
int in_parts(Comm* c, const char* from, size_t bytes, bool gives, const std::function<int(size_t, size_t)>& work) {
  for (size_t at = 0; at < bytes; at += SLOT) {
    size_t some = std::min(SLOT, bytes - at);
    if (gives) memcpy(c->slot(c->rank), from + at, some);
    if (!c->meet()) return REMOTE;
    if (int code = work(at, some)) return code;
    if (!c->meet()) return REMOTE;
  }
  return OK;
}

struct Message {
  bool sends;
  char* data;
  size_t bytes, done;
  int peer;
  Comm* comm;

  bool move() {
    int from = sends ? comm->rank : peer, to = sends ? peer : comm->rank;
    auto &sent = comm->shared->sent[from][to], &taken = comm->shared->taken[from][to];
    if ((sent == taken) != sends) return false;
    size_t some = std::min(SLOT, bytes - done);
    if (sends) memcpy(comm->mail(from, to), data + done, some);
    else memcpy(data + done, comm->mail(from, to), some);
    ++(sends ? sent : taken);
    done += some;
    return true;
  }
};
thread_local std::vector<Message> messages;

int exchange() {
  std::vector<Message> open = std::move(messages);
  messages.clear();
  for (long idle = 0;;) {
    bool busy = false, moved = false;
    for (auto& m : open)
      if (m.done < m.bytes) busy = true, moved |= m.move();
    if (!busy) return OK;
    if (moved) continue;
    usleep(20);
    if (++idle % 1000 == 0)
      for (auto& m : open)
        if (m.comm->broken()) return REMOTE;
  }
}

int message(bool sends, const void* x, size_t n, int type, int peer, Comm* c, void* stream) {
  simgpu_count("message");
  if (simgpu_finish(stream)) return SYSTEM;
  messages.push_back({sends, simgpu_host(x), n * width(type), 0, peer, c});
  return depth ? OK : exchange();
}

int join(Comm** out, const std::string& path, int size, int rank) {
  if (size > RANKS) return simgpu_fail(USAGE, "%d ranks: at most %d are simulated", size, RANKS);
  size_t bytes = sizeof(Shared) + (size_t)(RANKS + size * size) * SLOT;
  int file = open(path.c_str(), O_RDWR | O_CREAT, 0600);
  if (file < 0 || ftruncate(file, (off_t)bytes)) return SYSTEM;
  void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
  close(file);
  if (at == MAP_FAILED) return SYSTEM;
  auto* c = new Comm;
  c->shared = (Shared*)at;
  c->slots = (char*)at + sizeof(Shared);
  c->path = path;
  c->rank = rank;
  c->size = size;
  c->device = simgpu_current_device();
  c->shared->process[rank] = getpid();
  bool whole = c->meet();
  unlink(path.c_str());
  *out = c;
  return whole ? OK : REMOTE;
}

char* host(const void* p) { return simgpu_host(p); }

}  // namespace

#define API extern "C" int

API ncclGetVersion(int* v) { *v = SIMGPU_NCCL; return OK; }
API ncclGetUniqueId(Id* id) {
  timespec t;
  clock_gettime(CLOCK_REALTIME, &t);
  memset(id, 0, sizeof *id);
  snprintf(id->text, sizeof id->text, "/dev/shm/simgpu-%d-%lx-%lx", getpid(), t.tv_sec, t.tv_nsec);
  return OK;
}
API ncclCommInitRank(Comm** c, int size, Id id, int rank) { SIM_ENTER(int); return join(c, id.text, size, rank); }
API ncclCommInitRankConfig(Comm** c, int size, Id id, int rank, void*) { SIM_ENTER(int); return join(c, id.text, size, rank); }
API ncclCommInitRankScalable(Comm** c, int size, int rank, int, Id* ids, void*) { SIM_ENTER(int); return join(c, ids[0].text, size, rank); }
API ncclCommSplit(Comm* c, int color, int key, Comm** out, void*) {
  SIM_ENTER(int);
  c->shared->color[c->rank] = color;
  c->shared->key[c->rank] = key;
  if (!c->meet()) return REMOTE;
  int size = 0, rank = 0;
  for (int r = 0; r < c->size; ++r) {
    if (c->shared->color[r] != color) continue;
    int theirs = c->shared->key[r];
    ++size;
    rank += theirs < key || (theirs == key && r < c->rank);
  }
  if (!c->meet()) return REMOTE;
  std::string path = c->path + "-" + std::to_string(c->splits++) + "-" + std::to_string(color);
  *out = nullptr;
  return color < 0 ? OK : join(out, path, size, rank);
}
API ncclCommFinalize(Comm*) { return OK; }
API ncclCommDestroy(Comm* c) {
  if (c) c->shared->process[c->rank] = 0;  // it may end now
  return OK;
}
API ncclCommAbort(Comm* c) {
  c->error = REMOTE;
  c->shared->aborted = 1;
  return OK;
}
API ncclCommGetAsyncError(Comm* c, int* e) { *e = c->error; return OK; }
API ncclCommCount(const Comm* c, int* n) { *n = c->size; return OK; }
API ncclCommUserRank(const Comm* c, int* n) { *n = c->rank; return OK; }
API ncclCommRegister(Comm*, void*, size_t, void** handle) { *handle = nullptr; return OK; }
API ncclCommDeregister(Comm*, void*) { return OK; }
API ncclMemAlloc(void** p, size_t n) { SIM_ENTER(int); return simgpu_allocate(n, p) ? SYSTEM : OK; }
API ncclMemFree(void* p) { SIM_ENTER(int); return simgpu_release(p) ? SYSTEM : OK; }
extern "C" const char* ncclGetErrorString(int e) {
  return e == OK ? "no error" : e == REMOTE ? "remote process exited or there was a network error" : "unhandled system error";
}
extern "C" const char* ncclGetLastError(Comm*) { return ""; }

API ncclGroupStart() { ++depth; return OK; }
API ncclGroupEnd() {
  if (--depth) return OK;
  std::vector<std::function<int()>> works = std::move(queued);
  queued.clear();
  for (auto& work : works)
    if (int code = work()) return code;
  return exchange();
}
API ncclSend(const void* x, size_t n, int type, int peer, Comm* c, void* s) { SIM_ENTER(int); return message(true, x, n, type, peer, c, s); }
API ncclRecv(void* x, size_t n, int type, int peer, Comm* c, void* s) { SIM_ENTER(int); return message(false, x, n, type, peer, c, s); }

API ncclAllReduce(const void* in, void* out, size_t n, int type, int op, Comm* c, void* s) {
  SIM_ENTER(int);
  return do_or_queue(s, [=] {
    return in_parts(c, host(in), n * width(type), true, [=](size_t at, size_t some) { return reduce(c, host(out) + at, some / width(type), type, op); });
  });
}
API ncclReduce(const void* in, void* out, size_t n, int type, int op, int root, Comm* c, void* s) {
  SIM_ENTER(int);
  return do_or_queue(s, [=] {
    return in_parts(c, host(in), n * width(type), true, [=](size_t at, size_t some) {
      return c->rank == root ? reduce(c, host(out) + at, some / width(type), type, op) : (int)OK;
    });
  });
}
API ncclReduceScatter(const void* in, void* out, size_t n, int type, int op, Comm* c, void* s) {
  SIM_ENTER(int);
  return do_or_queue(s, [=] {
    size_t whole = n * width(type);
    std::vector<char> mine(whole);  // the input may overlap the output
    for (int owner = 0; owner < c->size; ++owner) {
      int code = in_parts(c, host(in) + owner * whole, whole, true, [&](size_t at, size_t some) {
        return owner == c->rank ? reduce(c, mine.data() + at, some / width(type), type, op) : (int)OK;
      });
      if (code) return code;
    }
    memcpy(host(out), mine.data(), whole);
    return (int)OK;
  });
}
API ncclAllGather(const void* in, void* out, size_t n, int type, Comm* c, void* s) {
  SIM_ENTER(int);
  return do_or_queue(s, [=] {
    size_t whole = n * width(type);
    return in_parts(c, host(in), whole, true, [=](size_t at, size_t some) {
      for (int r = 0; r < c->size; ++r) memcpy(host(out) + r * whole + at, c->slot(r), some);
      return (int)OK;
    });
  });
}
API ncclBroadcast(const void* in, void* out, size_t n, int type, int root, Comm* c, void* s) {
  SIM_ENTER(int);
  return do_or_queue(s, [=] {
    return in_parts(c, host(in), n * width(type), c->rank == root, [=](size_t at, size_t some) {
      memcpy(host(out) + at, c->slot(root), some);
      return (int)OK;
    });
  });
}
API ncclBcast(void* x, size_t n, int type, int root, Comm* c, void* s) { SIM_ENTER(int); return ncclBroadcast(x, x, n, type, root, c, s); }
