// What is done on the devices while a trace is open, in order.
#include <unistd.h>

#include <mutex>
#include <vector>

#include "sim.h"

namespace {

struct Traced {
  const char* name;
  void* stream;
  long thread;
  SimWeight weight;
};

std::mutex& mutex = *new std::mutex;
auto& all = *new std::vector<Traced>;
std::atomic<bool> open_;
thread_local SimWeight next{-1, 0, 0};

}  // namespace

extern "C" {

void simgpu_weigh(SimWeight weight) { next = weight; }

void simgpu_note_traced(void* stream, const char* name, const SimRange* ranges, int n) {
  SimWeight weight = next.read < 0 ? SimWeight{0, 0, 0} : next;
  if (next.read < 0)
    for (int i = 0; i < n; ++i) (ranges[i].access == SIM_READS ? weight.read : weight.written) += (double)ranges[i].bytes;
  next.read = -1;
  if (!open_) return;
  std::lock_guard lock(mutex);
  all.push_back({name, stream, (long)gettid(), weight});
}

/// Opens or closes the trace; opening it forgets what was there.
void simgpu_trace(bool begin) {
  std::lock_guard lock(mutex);
  if (begin) all.clear();
  open_ = begin;
}
void simgpu_each_traced(void (*each)(const char*, void*, long, double, double, double)) {
  std::lock_guard lock(mutex);
  for (auto& x : all) each(x.name, x.stream, x.thread, x.weight.read, x.weight.written, x.weight.multiply_adds);
}

}  // extern "C"
