// CUDA graphs.
//
// What is captured is also done, as the operators' results tell the shapes of what follows; at the end
// of the capture all memory is again as it was before. A launch does everything anew, in the order of
// the capture, on one stream.
#include "graph.h"

#include <map>

#include "order.h"

struct Graph {
  unsigned long long number;
  std::vector<SimNode> nodes;
  std::map<uintptr_t, unsigned long> needed;  // blocks of before -> when they were given out
  // while it is captured
  Stream* origin;
  unsigned long blocks;  // that had been given out when it began
  std::map<uintptr_t, std::vector<char>> memory;
  std::vector<SimRange> others;  // what streams that are not captured wrote meanwhile
  bool failed = false;
  int users = 1;  // it and what is instantiated from it are one
};

namespace {

std::set<Graph*>& captures = *new std::set<Graph*>;
unsigned long long begun = 0;
thread_local bool launching = false;

}  // namespace

void simgpu_keep(void* stream, const SimNode& node) {
  Lock lock(streams.mutex);
  if (Graph* graph = named(stream)->capture) graph->nodes.push_back(node);
}

void note_in_captures(Stream* s, const SimRange* ranges, int n) {
  for (Graph* graph : captures)
    for (int i = 0; i < n; ++i) {
      unsigned long born;
      if (s->capture != graph && ranges[i].access != SIM_READS && simgpu_owner(ranges[i].at) >= 0) graph->others.push_back(ranges[i]);
      uintptr_t block = s->capture == graph ? simgpu_lasting_block(ranges[i].at, &born) : 0;
      if (block && born <= graph->blocks) graph->needed[block] = born;
    }
}

extern "C" {

bool simgpu_launching() { return launching; }

unsigned long long simgpu_capture(void* stream) {
  Lock lock(streams.mutex);
  Graph* graph = named(stream)->capture;
  return graph ? graph->number : 0;
}

int simgpu_refuse_in_capture(void* stream, const char* what) {
  {
    Lock lock(streams.mutex);
    Graph* graph = named(stream)->capture;
    if (!graph) return SIM_OK;
    graph->failed = true;
  }
  return simgpu_fail(SIM_CAPTURING, "%s while the stream is captured\n    %s", what, simgpu_where_text(simgpu_where(false)));
}

int simgpu_begin_capture(void* stream) {
  Lock lock(streams.mutex);
  Stream* s = named(stream);
  if (s->own || s->capture) return simgpu_fail(SIM_CAPTURING, "the capture of the default stream, or of one that is captured");
  s->capture = new Graph{++begun, {}, {}, s, simgpu_blocks(), simgpu_contents(), {}};
  captures.insert(s->capture);
  return SIM_OK;
}

bool simgpu_join_capture(void* stream, unsigned long long number) {
  Lock lock(streams.mutex);
  Stream* s = named(stream);
  if (simgpu_capture(s) == number) return true;
  if (s->capture) s->capture->failed = true;
  for (Graph* graph : captures)
    if (graph->number == number && !s->capture && !s->own) {
      s->capture = graph;
      return true;
    }
  return false;
}

int simgpu_end_capture(void* stream, void** out) {
  Lock lock(streams.mutex);
  Stream* s = named(stream);
  Graph* graph = s->capture;
  if (!graph || graph->origin != s) return simgpu_fail(SIM_UNMATCHED, "the capture of this stream has not begun");
  int code = graph->failed ? SIM_CAPTURE_FAILED : SIM_OK;
  for (Stream* other : streams.all) {
    if (other->capture != graph) continue;
    other->capture = nullptr;
    if (!s->clock.covers(other->clock)) code = simgpu_fail(SIM_UNJOINED, "the captured stream does not wait for the work of another that is captured with it");
    streams.host.join(other->clock);  // none of that was done
  }
  captures.erase(graph);
  std::vector<std::vector<char>> kept;
  for (auto& it : graph->others) kept.emplace_back(simgpu_host(it.at), simgpu_host(it.at) + it.bytes);
  simgpu_restore(graph->memory);
  for (size_t i = 0; i < kept.size(); ++i) std::copy(kept[i].begin(), kept[i].end(), simgpu_host(graph->others[i].at));
  graph->memory.clear();
  *out = code ? nullptr : graph;
  if (code) delete graph;
  return code;
}

int simgpu_launch_graph(void* it, void* stream) {
  auto* graph = (Graph*)it;
  if (int code = simgpu_refuse_in_capture(stream, "a graph is launched")) return code;
  for (auto [block, born] : graph->needed) {
    unsigned long now;
    if (simgpu_lasting_block((void*)block, &now) != block || now != born)
      return simgpu_fail(SIM_ILLEGAL_ADDRESS, "a graph uses memory at %p, which was freed after its capture\n    %s", (void*)block, simgpu_where_text(simgpu_where(false)));
  }
  launching = true;
  int code = SIM_OK;
  for (size_t i = 0; i < graph->nodes.size() && !code; ++i) code = graph->nodes[i](stream);
  launching = false;
  return code;
}

void simgpu_share_graph(void* graph) { ++((Graph*)graph)->users; }
void simgpu_free_graph(void* graph) {
  if (!--((Graph*)graph)->users) delete (Graph*)graph;
}
unsigned long simgpu_graph_nodes(void* graph) { return ((Graph*)graph)->nodes.size(); }

}  // extern "C"
