// NCCL's collectives between processes of one machine, over shared memory.
//
// A call does its work at once, in the thread that makes it; sums are made in the order of the ranks.
// A rank that has died is noticed: its process is looked for while the others wait.
#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <functional>
#include <string>
#include <vector>

#include "graph.h"
#include "nccl.h"

namespace {

struct Shared {
  std::atomic<int> arrived, aborted;
  std::atomic<unsigned> round;
  std::atomic<int> process[RANKS], device[RANKS];
  std::atomic<int> color[RANKS], key[RANKS];                     // of ncclCommSplit
  std::atomic<unsigned long> sent[RANKS][RANKS], taken[RANKS][RANKS];  // messages from, to
  Call calls[2][RANKS];  // of the last two collectives: a rank may be one ahead of those that compare
};

struct Id { char text[128]; };

/// A process that has ended and whose parent has not noticed counts as gone.
bool lives(int process) {
  FILE* file = fopen(("/proc/" + std::to_string(process) + "/stat").c_str(), "r");
  if (!file) return false;
  char state = 0;
  bool ended = fscanf(file, "%*d (%*[^)]) %c", &state) == 1 && state == 'Z';
  fclose(file);
  return !ended;
}

struct Comm {
  Shared* shared;
  char* slots;
  std::string path;
  int rank, size, device, splits = 0;
  unsigned called = 0;
  Call now{"ncclCommInitRank", ""};
  std::atomic<int> error{OK};

  char* slot(int of) { return slots + of * SLOT; }
  char* mail(int from, int to) { return slots + (size_t)(RANKS + from * size + to) * SLOT; }

  /// Why this cannot go on; empty if it can.
  std::string broken() {
    if (shared->aborted || error) return "was aborted";
    for (int r = 0; r < size; ++r)
      if (int process = shared->process[r]; process && !lives(process)) return "rank " + std::to_string(r) + " is gone";
    return "";
  }
  int give_up(const std::string& why) {
    error = REMOTE;
    return simgpu_fail(REMOTE, "rank %d of %d waits in %s, but %s\n    %s", rank, size, now.what, why.c_str(), now.line);
  }

  /// Waits until every rank is here.
  int meet() {
    unsigned round = shared->round;
    if (shared->arrived.fetch_add(1) + 1 == size) {
      shared->arrived = 0;
      ++shared->round;
      return OK;
    }
    for (long i = 1; shared->round == round; ++i) {
      if (i > 200) usleep(50);
      else sched_yield();
      if (i % 1000) continue;
      std::string why = broken();
      if (!why.empty() && shared->round == round) return give_up(why);  // who was the last may have left
    }
    return OK;
  }

  /// Whether all ranks ask for the same: none goes on otherwise.
  int agree(const Call& mine) {
    now = mine;
    Call* calls = shared->calls[called++ % 2];
    calls[rank] = mine;
    if (int code = meet()) return code;
    for (int r = 0; r < size; ++r)
      if (strcmp(calls[r].what, mine.what))
        return simgpu_fail(USAGE, "rank %d of %d calls %s, but rank %d calls %s\n    rank %d: %s\n    rank %d: %s", rank, size,
                           mine.what, r, calls[r].what, rank, mine.line, r, calls[r].line);
    return OK;
  }
};

// Between ncclGroupStart and ncclGroupEnd calls only say what is to be done.
thread_local int depth = 0;
thread_local std::vector<std::function<int()>> queued;

using Work = std::function<int()>;

/// Does a collective or queues it: `name` of n elements, in memory that it reads and writes.
int collective(Comm* c, const char* name, size_t n, int type, const char* how, int number, void* stream,
               std::vector<SimRange> ranges, Work work) {
  static const char* types[] = {"int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64", "bfloat16", "float8", "float8"};
  simgpu_count("collective");
  if (simgpu_work(stream, name, ranges.data(), (int)ranges.size())) return SYSTEM;
  simgpu_keep(stream, [=](void* now) { return collective(c, name, n, type, how, number, now, ranges, work) ? SIM_LAUNCH_FAILED : SIM_OK; });
  Call call{};
  snprintf(call.what, sizeof call.what, "%s of %zu %s, %s %d", name, n, types[type], how, number);
  snprintf(call.line, sizeof call.line, "%s", simgpu_where_text(simgpu_where(false)));
  auto whole = [=] {
    int code = c->agree(call);
    return code ? code : work();
  };
  if (!depth) return whole();
  queued.push_back(whole);
  return OK;
}

/// Calls `work` with (offset, bytes) for parts of at most a slot, all ranks meeting before and after it.
int in_parts(Comm* c, const char* from, size_t bytes, bool gives, const std::function<int(size_t, size_t)>& work) {
  for (size_t at = 0; at < bytes; at += SLOT) {
    size_t some = std::min(SLOT, bytes - at);
    if (gives) memcpy(c->slot(c->rank), from + at, some);
    if (int code = c->meet()) return code;
    if (int code = work(at, some)) return code;
    if (int code = c->meet()) return code;
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
  std::string why;
  for (long idle = 1;; ++idle) {
    bool busy = false, moved = false;
    for (auto& m : open)
      if (m.done < m.bytes) busy = true, moved |= m.move();
    if (!busy) return OK;
    if (moved) continue;
    usleep(20);
    if (!why.empty()) return open[0].comm->give_up(why);
    if (idle % 1000) continue;
    for (auto& m : open)
      if (why.empty()) why = m.comm->broken();  // what has come before that is taken first
  }
}

int message(bool sends, const void* x, size_t n, int type, int peer, Comm* c, void* stream) {
  simgpu_count("message");
  const char* name = sends ? "ncclSend" : "ncclRecv";
  SimRange range{x, n * width(type), sends ? SIM_READS : SIM_WRITES};
  if (simgpu_work(stream, name, &range, 1)) return SYSTEM;
  if (simgpu_capture(stream)) return simgpu_fail(SYSTEM, "%s in a graph is not simulated", name);
  snprintf(c->now.what, sizeof c->now.what, "%s of %zu bytes, peer %d", name, range.bytes, peer);
  snprintf(c->now.line, sizeof c->now.line, "%s", simgpu_where_text(simgpu_where(false)));
  messages.push_back({sends, simgpu_host(x), range.bytes, 0, peer, c});
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
  // where some are hidden, each rank may call another one device 0
  c->shared->device[rank] = getenv("CUDA_VISIBLE_DEVICES") ? ~rank : c->device;
  int code = c->meet();
  for (int r = 0; r < size && !code; ++r)
    if (r != rank && c->shared->device[r] == c->shared->device[rank])
      code = simgpu_fail(USAGE, "Duplicate GPU detected : rank %d and rank %d both on CUDA device %d", rank, r, c->device);
  unlink(path.c_str());
  *out = c;
  return code;
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
  if (int code = c->meet()) return code;
  int size = 0, rank = 0;
  for (int r = 0; r < c->size; ++r) {
    if (c->shared->color[r] != color) continue;
    int theirs = c->shared->key[r];
    ++size;
    rank += theirs < key || (theirs == key && r < c->rank);
  }
  if (int code = c->meet()) return code;
  std::string path = c->path + "-" + std::to_string(c->splits++) + "-" + std::to_string(color);
  *out = nullptr;
  return color < 0 ? OK : join(out, path, size, rank);
}
API ncclCommFinalize(Comm*) { return OK; }
API ncclCommDestroy(Comm* c) {
  if (c) c->shared->process[c->rank] = -1;
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
extern "C" const char* ncclGetLastError(Comm*) { return simgpu_last_failure(); }

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

/// Reduces parts that all ranks gave, at the ranks where it is wanted.
static Work reduction(Comm* c, const void* in, void* out, size_t n, int type, int op, bool wanted) {
  return [=] {
    return in_parts(c, host(in), n * width(type), true, [=](size_t at, size_t some) {
      return wanted ? reduce(c->slots, c->size, host(out) + at, some / width(type), type, op) : (int)OK;
    });
  };
}
API ncclAllReduce(const void* in, void* out, size_t n, int type, int op, Comm* c, void* s) {
  SIM_ENTER(int);
  size_t bytes = n * width(type);
  return collective(c, "ncclAllReduce", n, type, "reduction", op, s, {{in, bytes, SIM_READS}, {out, bytes, SIM_WRITES}},
                    reduction(c, in, out, n, type, op, true));
}
API ncclReduce(const void* in, void* out, size_t n, int type, int op, int root, Comm* c, void* s) {
  SIM_ENTER(int);
  bool wanted = c->rank == root;
  size_t bytes = n * width(type);
  return collective(c, "ncclReduce", n, type, "root", root, s, {{in, bytes, SIM_READS}, {out, wanted ? bytes : 0, SIM_WRITES}},
                    reduction(c, in, out, n, type, op, wanted));
}
API ncclReduceScatter(const void* in, void* out, size_t n, int type, int op, Comm* c, void* s) {
  SIM_ENTER(int);
  size_t whole = n * width(type);
  auto work = [=] {
    std::vector<char> mine(whole);  // the input may overlap the output
    for (int owner = 0; owner < c->size; ++owner) {
      int code = in_parts(c, host(in) + owner * whole, whole, true, [&](size_t at, size_t some) {
        return owner == c->rank ? reduce(c->slots, c->size, mine.data() + at, some / width(type), type, op) : (int)OK;
      });
      if (code) return code;
    }
    memcpy(host(out), mine.data(), whole);
    return (int)OK;
  };
  return collective(c, "ncclReduceScatter", n, type, "reduction", op, s, {{in, c->size * whole, SIM_READS}, {out, whole, SIM_WRITES}}, work);
}
API ncclAllGather(const void* in, void* out, size_t n, int type, Comm* c, void* s) {
  SIM_ENTER(int);
  size_t whole = n * width(type);
  auto work = [=] {
    return in_parts(c, host(in), whole, true, [=](size_t at, size_t some) {
      for (int r = 0; r < c->size; ++r) memcpy(host(out) + r * whole + at, c->slot(r), some);
      return (int)OK;
    });
  };
  return collective(c, "ncclAllGather", n, type, "ranks", c->size, s, {{in, whole, SIM_READS}, {out, c->size * whole, SIM_WRITES}}, work);
}
API ncclBroadcast(const void* in, void* out, size_t n, int type, int root, Comm* c, void* s) {
  SIM_ENTER(int);
  size_t bytes = n * width(type);
  bool gives = c->rank == root;
  auto work = [=] {
    return in_parts(c, host(in), bytes, gives, [=](size_t at, size_t some) {
      memcpy(host(out) + at, c->slot(root), some);
      return (int)OK;
    });
  };
  return collective(c, "ncclBroadcast", n, type, "root", root, s, {{in, gives ? bytes : 0, SIM_READS}, {out, bytes, SIM_WRITES}}, work);
}
API ncclBcast(void* x, size_t n, int type, int root, Comm* c, void* s) { SIM_ENTER(int); return ncclBroadcast(x, x, n, type, root, c, s); }
