// Streams, events, copies and fills.
//
// Work is done when it is queued. But what a copy brings to pinned memory of the host arrives only
// when somebody waits for it, and pinned memory that a copy reads must stay as it is until then.
#include <algorithm>
#include <cstring>
#include <ctime>
#include <list>
#include <string>
#include <utility>

#include "graph.h"
#include "order.h"

namespace {

struct Event {
  Stream* stream = nullptr;
  unsigned long number = 0;
  double ms = 0;
  Clock clock;
  int asked = 0;
  unsigned long long capture = 0;
};

/// A copy between pinned memory and a device that nobody has waited for yet.
struct Flight {
  char* host;
  std::vector<char> was, brings;  // what the host has there; empty unless the copy goes there
  int where;                      // the line that asked for it
};
auto& flights = *new std::list<Flight>;

/// What this thread has found to be over by asking: no other thread's work is ordered by that.
thread_local Clock& asked = *new Clock;  // not destroyed: other libraries ask until a thread's very end

int settle(Stream* s, unsigned long until) {
  Lock lock(streams.mutex);
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

/// What pinned memory is to the host when a copy from or to it has been waited for.
int land(std::list<Flight>::iterator f) {
  bool changed = memcmp(f->host, f->was.data(), f->was.size());
  bool down = !f->brings.empty();
  std::copy(f->brings.begin(), f->brings.end(), f->host);
  for (Flight& other : flights) {  // whose memory the host has not changed by this
    char *begin = std::max(f->host, other.host), *end = std::min(f->host + f->brings.size(), other.host + other.was.size());
    if (begin < end) std::copy(begin, end, other.was.begin() + (begin - other.host));
  }
  Flight it = std::move(*f);
  flights.erase(f);
  if (!changed) return SIM_OK;
  return simgpu_fail(SIM_ILLEGAL_ADDRESS, "race: the pinned memory at %p changed before the copy %s it was waited for\n    copy %s",
                     it.host, down ? "to" : "from", simgpu_where_text(it.where));
}

double now_ms() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec * 1e3 + (double)t.tv_nsec * 1e-6;
}

}  // namespace

Streams& streams = *new Streams;

Stream* named(void* handle) {
  if ((uintptr_t)handle > 2) return (Stream*)handle;  // 0 to 2 mean the device's own stream
  Lock lock(streams.mutex);
  Stream*& s = streams.defaults[simgpu_current_device()];
  if (!s) {
    s = new Stream;
    s->device = simgpu_current_device();
    s->own = true;
  }
  return s;
}

Clock known() {
  Clock it = streams.host;
  it.join(asked);
  return it;
}

Clock& caught_up(Stream* s) {
  Lock lock(streams.mutex);
  s->clock.join(streams.host);
  s->clock.join(asked);
  if (s->own) {
    for (Stream* other : streams.all)
      if (other->blocking && other->device == s->device) s->clock.join(other->clock);
  } else if (s->blocking && streams.defaults.count(s->device)) {
    s->clock.join(streams.defaults[s->device]->clock);
  }
  return s->clock;
}

extern "C" {

void* simgpu_new_stream(int priority, bool blocking) {
  Lock lock(streams.mutex);
  auto* s = new Stream;
  s->device = simgpu_current_device();
  s->priority = priority;
  s->blocking = blocking;
  streams.all.insert(s);
  return s;
}
int simgpu_free_stream(void* handle) {
  Lock lock(streams.mutex);
  if (!streams.all.count((Stream*)handle)) return SIM_INVALID_HANDLE;
  if (((Stream*)handle)->capture) return simgpu_fail(SIM_CAPTURING, "a stream is destroyed while it is captured");
  int code = settle((Stream*)handle, ~0ul);
  streams.all.erase((Stream*)handle);
  return code;  // the memory stays: events may name it
}
int simgpu_stream_device(void* stream) { return named(stream)->device; }
int simgpu_stream_priority(void* stream) { return named(stream)->priority; }
int simgpu_finish(void* stream) { return settle(named(stream), ~0ul); }
int simgpu_synchronize(void* stream, bool only_asks) {
  if (int code = simgpu_refuse_in_capture(stream, "the host waits for it")) return code;
  if (!only_asks) simgpu_count("wait");
  Stream* s = named(stream);
  std::unique_lock lock(streams.mutex);
  const Clock& all = caught_up(s);
  bool waits = !only_asks && !known().covers(all) && !std::exchange(s->staged, false);
  streams.host.join(all);
  lock.unlock();
  if (waits) simgpu_where(true);
  return settle(s, ~0ul);
}
int simgpu_synchronize_device() {
  std::unique_lock lock(streams.mutex);
  std::vector<Stream*> all(streams.all.begin(), streams.all.end());
  all.push_back(named(nullptr));
  lock.unlock();
  int code = SIM_OK;
  for (Stream* s : all)
    if (int refused = s->device == simgpu_current_device() ? simgpu_refuse_in_capture(s, "the host waits for the device") : SIM_OK) return refused;
  lock.lock();
  for (Stream* s : all) {
    if (s->device == simgpu_current_device()) streams.host.join(s->clock);
    if (int error = settle(s, ~0ul)) code = error;
  }
  return code;
}

void* simgpu_new_event() { return new Event; }
void simgpu_record(void* event, void* stream) {
  Lock lock(streams.mutex);
  Stream* s = named(stream);
  *(Event*)event = {s, s->queued, now_ms(), caught_up(s), 0, simgpu_capture(s)};
}
int simgpu_stream_wait(void* stream, void* event) {
  std::unique_lock lock(streams.mutex);
  Event was = *(Event*)event;  // it may be recorded anew
  Stream* s = named(stream);
  if (was.stream && !simgpu_join_capture(s, was.capture)) {
    const char* which = s->capture ? "a captured stream waits for an event from outside of its capture" : "a stream waits for an event of a capture that it cannot join";
    lock.unlock();  // of which who has Python's may be in want
    return simgpu_fail(SIM_ISOLATION, "%s\n    %s", which, simgpu_where_text(simgpu_where(false)));
  }
  s->clock.join(was.clock);
  if (was.stream && was.stream != s) when_waited_for(s, [was] { return settle(was.stream, was.number); });
  return SIM_OK;
}
int simgpu_event_wait(void* event) {
  simgpu_count("wait");
  Lock lock(streams.mutex);
  auto* e = (Event*)event;
  if (e->capture) return simgpu_fail(SIM_CAPTURING, "the host waits for an event of a capture");
  streams.host.join(e->clock);
  return e->stream ? settle(e->stream, e->number) : SIM_OK;
}
int simgpu_event_ready(void* event) {
  Lock lock(streams.mutex);
  auto* e = (Event*)event;
  if (!e->stream) return SIM_OK;
  if (e->capture) return simgpu_fail(SIM_CAPTURING, "the host asks for an event of a capture");
  // As late as a device that is busy. Otherwise PyTorch's allocators, which ask about all that is
  // under way at every turn, would order what the program itself has not.
  if (!known().covers(e->clock) && ++e->asked < 3) return SIM_NOT_READY;
  asked.join(e->clock);
  return settle(e->stream, e->number);
}
int simgpu_tell() {
  Lock lock(streams.mutex);
  streams.host.join(asked);
  return SIM_OK;
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
  const char* name = up ? "copy to the device" : down ? "copy to the host" : "copy on the device";
  simgpu_count(name);
  SimRange both[] = {{from, bytes, SIM_READS}, {to, bytes, SIM_WRITES}};
  Stream* s = named(stream);
  if (int code = simgpu_work(s, name, both, 2)) return code;
  bool pinned = asynchronous && (up ? simgpu_pinned(from) : down && simgpu_pinned(to));
  // CUDA waits for copies to and from pageable memory, asked for asynchronously or not
  bool waits = !pinned && (up || down);
  if (waits)
    if (int code = simgpu_refuse_in_capture(stream, "a copy from or to pageable memory")) return code;
  simgpu_keep(stream, [=](void* now) { return simgpu_copy(to, from, bytes, now, asynchronous); });
  int where = simgpu_where(waits);
  Lock lock(streams.mutex);
  if (s->capture && down) return SIM_OK;  // memory of the host is not put back after a capture
  auto* begin = (const char*)from;
  bool brought = up && std::any_of(flights.begin(), flights.end(), [=](const Flight& f) { return f.host < begin + bytes && begin < f.host + f.brings.size(); });
  int code = brought ? settle(s, s->queued) : SIM_OK;
  char* source = simgpu_host(from);
  char* target = simgpu_host(to);
  if (pinned && !s->capture) {
    auto* host = up ? source : target;
    Flight it{host, {host, host + bytes}, {}, where};
    if (down) it.brings.assign(source, source + bytes);
    flights.push_front(std::move(it));
    when_waited_for(s, [f = flights.begin()] { return land(f); });
  }
  if (!pinned || up) memmove(target, source, bytes);
  ++s->queued;
  s->staged = waits && up;
  if (waits && (down || !asynchronous)) {
    simgpu_count("wait in a copy");
    streams.host.join(s->clock);
    if (int error = settle(s, ~0ul)) code = error;
  }
  return code;
}

int simgpu_fill(void* to, unsigned value, int width, size_t count, void* stream) {
  simgpu_count("fill");
  SimRange range{to, width * count, SIM_WRITES};
  if (int code = simgpu_work(named(stream), "fill", &range, 1)) return code;
  simgpu_keep(stream, [=](void* now) { return simgpu_fill(to, value, width, count, now); });
  if (width == 1) {
    memset(simgpu_host(to), (int)value, count);
    return SIM_OK;
  }
  auto* words = (unsigned*)simgpu_host(to);
  for (size_t i = 0; i < count; ++i) words[i] = value;
  return SIM_OK;
}

}  // extern "C"
