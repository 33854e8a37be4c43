// Streams, and the clocks that tell what is ordered.
#pragma once
#include <algorithm>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <vector>

#include "sim.h"

struct Stream;

/// How much of each stream's work is over.
struct Clock : std::map<const Stream*, unsigned> {
  bool covers(const Stream* stream, unsigned time) const {
    auto it = find(stream);
    return !time || (it != end() && time <= it->second);
  }
  bool covers(const Clock& other) const {
    return std::all_of(other.begin(), other.end(), [this](auto& it) { return covers(it.first, it.second); });
  }
  void join(const Clock& other) {
    for (auto [stream, time] : other) (*this)[stream] = std::max((*this)[stream], time);
  }
};

struct Pending {
  unsigned long number;
  std::function<int()> settle;  // what its being waited for means to the host
};

struct Stream {
  int device = 0, priority = 0;
  bool blocking = false;  // ordered with the device's default stream
  bool own = false;       // it is that stream
  bool staged = false;    // the last work is a copy that the host has waited for, though not its arrival
  unsigned long queued = 0;
  std::deque<Pending> pending;
  Clock clock;  // of the last work
};

struct Streams {
  std::recursive_mutex mutex;
  std::set<Stream*> all;
  std::map<int, Stream*> defaults;
  Clock host;  // what some thread has waited for
};
extern Streams& streams;
using Lock = std::lock_guard<std::recursive_mutex>;

Stream* named(void* handle);
/// What this thread knows to be over: what was waited for, and what it has asked about.
Clock known();
/// The clock of a stream's next work: all that must be over by then.
Clock& caught_up(Stream* s);
