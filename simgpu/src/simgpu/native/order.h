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
struct Graph;

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
  Graph* capture = nullptr;
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
/// Tells the captures under way which memory work uses (graph.cpp).
void note_in_captures(Stream* s, const SimRange* ranges, int n);

// What a capture asks of memory (memory.cpp): what all of it holds, and to put that back, NaN where
// nothing was allocated then; how many blocks torch's allocator has given out; the block around an
// address and the number it had, or 0 if it is in a pool.
std::map<uintptr_t, std::vector<char>> simgpu_contents();
void simgpu_restore(const std::map<uintptr_t, std::vector<char>>& contents);
unsigned long simgpu_blocks();
uintptr_t simgpu_lasting_block(const void* pointer, unsigned long* number);
