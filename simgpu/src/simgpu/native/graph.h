// CUDA graphs, as the stand-ins for streams, memory and operators see them.
#pragma once
#include <functional>

/// Something that a graph does anew with each launch, on the stream of that; returns an error code.
using SimNode = std::function<int(void* stream)>;
/// Adds it to the graph that a stream is captured for, if there is one.
void simgpu_keep(void* stream, const SimNode& node);

extern "C" {
unsigned long long simgpu_capture(void* stream);  // the number of its capture, 0 if there is none
int simgpu_begin_capture(void* stream);
bool simgpu_join_capture(void* stream, unsigned long long number);  // whether it may wait for an event of this one
int simgpu_end_capture(void* stream, void** graph);
int simgpu_launch_graph(void* graph, void* stream);
void simgpu_share_graph(void* graph);
void simgpu_free_graph(void* graph);
bool simgpu_launching();  // this thread launches a graph
unsigned long simgpu_graph_nodes(void* graph);
int simgpu_refuse_in_capture(void* stream, const char* what);  // an error code, if it is captured
}
