// Streams, events, copies and fills.
//
// Work is done when it is queued. But what a copy brings to pinned memory of the host arrives only
// when somebody waits for it, and pinned memory that a copy reads must stay as it is until then.
#include <cstring>
#include <ctime>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <vector>

#include "sim.h"

namespace {

struct Pending {
  unsigned long number;
  std::function<int()> settle;  // what its being waited for means to the host
};

struct Stream {
  int device = 0, priority = 0;
  unsigned long queued = 0;
  std::deque<Pending> pending;
};

struct Event {
  Stream* stream = nullptr;
  unsigned long number = 0;
  double ms = 0;
};

struct State {
  std::recursive_mutex mutex;
  std::set<Stream*> streams;
  std::map<int, Stream*> defaults;
};
State& state() {
  static auto* it = new State;
  return *it;
}
using Lock = std::lock_guard<std::recursive_mutex>;

Stream* named(void* handle) {
  if ((uintptr_t)handle > 2) return (Stream*)handle;  // 0 to 2 mean the device's own stream
  Lock lock(state().mutex);
  Stream*& s = state().defaults[simgpu_current_device()];
  if (!s) {
    s = new Stream;
    s->device = simgpu_current_device();
  }
  return s;
}

int settle(Stream* s, unsigned long until) {
  Lock lock(state().mutex);
  int code = SIM_OK;
  while (!s->pending.empty() && s->pending.front().number <= until) {
    Pending next = std::move(s->pending.front());
    s->pending.pop_front();
    if (int error = next.settle()) code = error;
  }
  return code;
}

void when_waited_for(Stream* s, std::function<int()> work) {
  s->pending.push_back({++s->queued, std::move(work)});
}

double now_ms() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec * 1e3 + (double)t.tv_nsec * 1e-6;
}

}  // namespace

extern "C" {

void* simgpu_new_stream(int priority) {
  Lock lock(state().mutex);
  auto* s = new Stream;
  s->device = simgpu_current_device();
  s->priority = priority;
  state().streams.insert(s);
  return s;
}
int simgpu_free_stream(void* handle) {
  Lock lock(state().mutex);
  if (!state().streams.count((Stream*)handle)) return SIM_INVALID_HANDLE;
  int code = settle((Stream*)handle, ~0ul);
  state().streams.erase((Stream*)handle);
  return code;  // the memory stays: events may name it
}
int simgpu_stream_device(void* stream) { return named(stream)->device; }
int simgpu_stream_priority(void* stream) { return named(stream)->priority; }
int simgpu_finish(void* stream) { return settle(named(stream), ~0ul); }
int simgpu_finish_all() {
  Lock lock(state().mutex);
  int code = SIM_OK;
  for (Stream* s : state().streams)
    if (int error = settle(s, ~0ul)) code = error;
  for (auto& [device, s] : state().defaults)
    if (int error = settle(s, ~0ul)) code = error;
  return code;
}

void* simgpu_new_event() { return new Event; }
void simgpu_record(void* event, void* stream) {
  Lock lock(state().mutex);
  Stream* s = named(stream);
  *(Event*)event = {s, s->queued, now_ms()};
}
void simgpu_stream_wait(void* stream, void* event) {
  Lock lock(state().mutex);
  Event was = *(Event*)event;  // it may be recorded anew
  Stream* s = named(stream);
  if (was.stream && was.stream != s) when_waited_for(s, [was] { return settle(was.stream, was.number); });
}
int simgpu_finish_event(void* event) {
  auto* e = (Event*)event;
  return e->stream ? settle(e->stream, e->number) : SIM_OK;
}
int simgpu_elapsed(float* ms, void* begin, void* end) {
  auto *a = (Event*)begin, *b = (Event*)end;
  if (!a->stream || !b->stream) return SIM_INVALID_HANDLE;
  *ms = (float)(b->ms > a->ms ? b->ms - a->ms : 1e-4);
  return SIM_OK;
}

int simgpu_copy(void* to, const void* from, size_t bytes, void* stream, bool asynchronous) {
  if (!bytes) return SIM_OK;
  bool up = simgpu_owner(from) < 0 && simgpu_owner(to) >= 0;
  bool down = simgpu_owner(from) >= 0 && simgpu_owner(to) < 0;
  simgpu_count(up ? "copy to the device" : down ? "copy to the host" : "copy on the device");
  for (const void* end : {(const void*)to, from})
    if (int code = simgpu_inside(end, bytes, "a copy")) return code;
  Lock lock(state().mutex);
  Stream* s = named(stream);
  int code = up ? settle(s, s->queued) : SIM_OK;  // an earlier copy may bring its source
  char* source = simgpu_host(from);
  if (asynchronous && down && simgpu_pinned(to)) {
    when_waited_for(s, [to, data = std::vector<char>(source, source + bytes)] {
      memcpy(to, data.data(), data.size());
      return (int)SIM_OK;
    });
    return code;
  }
  memmove(simgpu_host(to), source, bytes);
  ++s->queued;
  if (asynchronous && up && simgpu_pinned(from)) {
    when_waited_for(s, [source, was = std::vector<char>(source, source + bytes)] {
      if (!memcmp(source, was.data(), was.size())) return (int)SIM_OK;
      return simgpu_fail(SIM_ILLEGAL_ADDRESS, "race: the pinned memory at %p changed before the copy from it "
                         "was waited for", source);
    });
  } else if (down || !asynchronous) {
    // CUDA waits for copies to pageable memory, asked for asynchronously or not
    simgpu_count("wait in a copy");
    if (int error = settle(s, ~0ul)) code = error;
  }
  return code;
}

int simgpu_fill(void* to, unsigned value, int width, size_t count, void* stream) {
  simgpu_count("fill");
  if (int code = simgpu_inside(to, width * count, "a fill")) return code;
  Lock lock(state().mutex);
  ++named(stream)->queued;
  if (width == 1) {
    memset(simgpu_host(to), (int)value, count);
    return SIM_OK;
  }
  auto* words = (unsigned*)simgpu_host(to);
  for (size_t i = 0; i < count; ++i) words[i] = value;
  return SIM_OK;
}

}  // extern "C"
