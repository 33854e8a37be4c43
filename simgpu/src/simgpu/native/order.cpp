// Who used which memory last, and whether what uses it now comes after that.
//
// Work is done in the order of the calls here; on a GPU only events, waits and the default stream
// order that of different streams. Each stream has a clock of what is over when its next work
// begins; a byte knows the last work that wrote it and those that have read it since.
#include <cstdlib>
#include <string>

#include "order.h"

namespace {

struct Use {
  const Stream* stream = nullptr;
  unsigned time = 0;
  int where = 0;
  const char* name = nullptr;  // of a kernel, an operator or an entry, which are there for ever
};

/// Bytes that have been used alike.
struct Cell {
  uintptr_t end;
  Use write;
  std::vector<Use> reads;       // since then; of each stream the last
  bool fresh = false;           // nobody has written it since the allocator gave it out
  bool of_another = false;      // it was used last for a tensor that is freed
};
auto& cells = *new std::map<uintptr_t, Cell>;  // other libraries call until the very end of the process
const bool off = getenv("SIMGPU_ORDER") && *getenv("SIMGPU_ORDER") == '0';

void cut(uintptr_t at) {
  auto it = cells.upper_bound(at);
  if (it == cells.begin() || (--it)->first == at || it->second.end <= at) return;
  cells.emplace(at, it->second);
  it->second.end = at;
}

/// Calls `f` with the cells that make up a range.
template <class F>
void each(uintptr_t at, size_t bytes, F f) {
  uintptr_t end = at + bytes;
  cut(at);
  cut(end);
  for (auto it = cells.lower_bound(at); at < end; ++it) {
    uintptr_t next = it == cells.end() ? end : std::min(it->first, end);
    if (at < next) it = cells.emplace_hint(it, at, Cell{next, {}, {}});
    f(it->second);
    at = it->second.end;
  }
}

std::string title(const Use& use, bool writes) {
  char text[512];
  snprintf(text, sizeof text, use.stream->own ? "%1$s on the default stream %2$s" : "%1$s on stream %3$p %2$s", use.name,
           writes ? "writes" : "reads", (const void*)use.stream);
  return text;
}

/// Notes a use; an error code if that is not ordered behind an earlier one.
int use(const SimRange& range, const Use& now, const Clock& clock) {
  int code = SIM_OK;
  auto over = [&](const Use& use) { return clock.covers(use.stream, use.time); };
  auto behind = [&](const Cell& cell, const Use& before, bool wrote) {
    if (code || over(before)) return;
    const char* freed = cell.of_another ? " for a tensor that is freed since, without record_stream or a wait" : "";
    code = simgpu_fail(SIM_ILLEGAL_ADDRESS, "race: %s memory at %p, which %s%s, and nothing orders them\n    %s: %s\n    %s: %s",
                       title(now, range.access).c_str(), range.at, title(before, wrote).c_str(), freed, now.name,
                       simgpu_where_text(now.where), before.name, simgpu_where_text(before.where));
  };
  auto address = (uintptr_t)range.at;
  each(address, range.bytes, [&](Cell& cell) {
    if (range.access == SIM_COVERS) {
      cell.fresh = false;
      return;
    }
    behind(cell, cell.write, true);
    if (range.access == SIM_WRITES)
      for (auto& read : cell.reads) behind(cell, read, false);
    std::erase_if(cell.reads, over);
    cell.reads.push_back(now);
    cell.of_another = false;
  });
  if (range.access != SIM_WRITES) return code;
  auto first = cells.find(address);
  first->second = {address + range.bytes, now, {}};
  cells.erase(std::next(first), cells.lower_bound(address + range.bytes));
  return code;
}

}  // namespace

extern "C" {

int simgpu_work(void* stream, const char* name, const SimRange* ranges, int n) {
  for (int i = 0; i < n; ++i)
    if (int code = !ranges[i].bytes ? SIM_OK : simgpu_inside(ranges[i].at, ranges[i].bytes, name)) return code;
  simgpu_note_traced(stream, name, ranges, n);
  int where = off ? 0 : simgpu_where(false), code = SIM_OK;
  Lock lock(streams.mutex);
  Stream* s = named(stream);
  note_in_captures(s, ranges, n);
  if (off) return SIM_OK;
  s->staged = false;
  Use now{s, ++caught_up(s)[s], where, name};
  for (int i = 0; i < n; ++i)
    if (simgpu_owner(ranges[i].at) >= 0 && ranges[i].bytes)
      if (int error = use(ranges[i], now, s->clock)) code = error;
  return code;
}

int simgpu_written(const void* at, size_t bytes, const char* name) {
  bool fresh = false;
  int where = simgpu_where(false);
  Lock lock(streams.mutex);
  each((uintptr_t)at, bytes, [&](Cell& cell) { fresh |= cell.fresh; });
  if (!fresh) return SIM_OK;
  return simgpu_fail(SIM_ILLEGAL_ADDRESS, "%s depends on memory at %p that nobody has written\n    %s", name, at, simgpu_where_text(where));
}

void simgpu_given_out(uintptr_t at, size_t bytes) {
  if (off) return;
  Lock lock(streams.mutex);
  each(at, bytes, [](Cell& cell) { cell.fresh = cell.of_another = true; });
}
void simgpu_given_back(uintptr_t at, size_t bytes) {
  Lock lock(streams.mutex);
  Clock mine = known();  // the allocator has asked, and other threads rely on it for this memory
  auto over = [&](const Use& use) { return mine.covers(use.stream, use.time); };
  each(at, bytes, [&](Cell& cell) {
    std::erase_if(cell.reads, over);
    if (over(cell.write)) cell.write = {};
  });
}
void simgpu_forget(uintptr_t at, size_t bytes) {
  Lock lock(streams.mutex);
  cut(at);
  cut(at + bytes);
  cells.erase(cells.lower_bound(at), cells.lower_bound(at + bytes));
}

}  // extern "C"
