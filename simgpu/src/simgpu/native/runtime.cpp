// The runtime's API over the simulated devices.
#include <cuda_runtime_api.h>
#include <cuda.h>
#include <cxxabi.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <unordered_map>
#include <utility>

#include "graph.h"
#include "sim.h"

static thread_local cudaError_t last = cudaSuccess;
static cudaError_t said(int code) {
  if (code) last = (cudaError_t)code;
  return (cudaError_t)code;
}

#define API extern "C" cudaError_t CUDARTAPI
#define ENTER SIM_ENTER(said)

// --- devices

API cudaGetDeviceCount(int* n) { ENTER; *n = simgpu_devices(); return said(*n ? SIM_OK : SIM_NO_DEVICE); }
API cudaGetDevice(int* d) { *d = simgpu_current_device(); return cudaSuccess; }
API cudaSetDevice(int d) { ENTER; return said(simgpu_set_device(d)); }
API cudaDeviceSynchronize() { ENTER; simgpu_count("wait"); simgpu_where(true); return said(simgpu_synchronize_device()); }
API cudaDriverGetVersion(int* v) { ENTER; *v = CUDART_VERSION; return cudaSuccess; }
API cudaRuntimeGetVersion(int* v) { ENTER; *v = CUDART_VERSION; return cudaSuccess; }
API cudaDeviceGetAttribute(int* v, cudaDeviceAttr a, int) { ENTER; *v = simgpu_attribute(a); return cudaSuccess; }
API cudaGetDeviceProperties(cudaDeviceProp* p, int d) {
  ENTER;
  if (d >= simgpu_devices()) return said(SIM_INVALID_DEVICE);
  memset(p, 0, sizeof *p);
  snprintf(p->name, sizeof p->name, "Simulated GPU sm_%d", simgpu_arch());
  snprintf(p->uuid.bytes, sizeof p->uuid.bytes, "simgpu-%d", d);
  p->totalGlobalMem = simgpu_capacity();
  p->major = simgpu_arch() / 10;
  p->minor = simgpu_arch() % 10;
  p->multiProcessorCount = simgpu_multiprocessors();
  p->warpSize = 32;
  p->sharedMemPerBlock = simgpu_attribute(cudaDevAttrMaxSharedMemoryPerBlock);
  p->sharedMemPerBlockOptin = simgpu_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  p->sharedMemPerMultiprocessor = simgpu_attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
  p->regsPerBlock = p->regsPerMultiprocessor = 1 << 16;
  p->maxThreadsPerBlock = 1024;
  p->maxThreadsPerMultiProcessor = 2048;
  p->maxBlocksPerMultiProcessor = 32;
  p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
  p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 0x7FFFFFFF;
  p->maxGridSize[1] = p->maxGridSize[2] = 0xFFFF;
  p->l2CacheSize = simgpu_attribute(cudaDevAttrL2CacheSize);
  p->memoryBusWidth = simgpu_attribute(cudaDevAttrGlobalMemoryBusWidth);
  p->textureAlignment = 512;
  p->unifiedAddressing = p->concurrentKernels = p->canMapHostMemory = 1;
  p->pciBusID = d + 1;
  return cudaSuccess;
}
API cudaDeviceGetStreamPriorityRange(int* low, int* high) {
  ENTER;
  if (low) *low = 0;
  if (high) *high = -5;
  return cudaSuccess;
}
API cudaDeviceGetPCIBusId(char* text, int n, int d) { ENTER; snprintf(text, n, "0000:%02x:00.0", d + 1); return cudaSuccess; }
API cudaDeviceCanAccessPeer(int* can, int a, int b) { ENTER; *can = a != b; return cudaSuccess; }
API cudaDeviceEnablePeerAccess(int, unsigned) { ENTER; return cudaSuccess; }
API cudaProfilerStart() { ENTER; return cudaSuccess; }
API cudaProfilerStop() { ENTER; return cudaSuccess; }

// --- errors

API cudaGetLastError() { return std::exchange(last, cudaSuccess); }
API cudaPeekAtLastError() { return last; }
extern "C" const char* CUDARTAPI cudaGetErrorString(cudaError_t e) { return simgpu_error_text(e); }
extern "C" const char* CUDARTAPI cudaGetErrorName(cudaError_t e) { return simgpu_error_text(e); }

// --- memory

API cudaMalloc(void** p, size_t n) { ENTER; return said(simgpu_allocate(n, p)); }
API cudaFree(void* p) {
  ENTER;
  int code = simgpu_synchronize_device();
  return said(code ? code : simgpu_release(p));
}
API cudaHostAlloc(void** p, size_t n, unsigned) {
  ENTER;
  if (posix_memalign(p, 4096, n ? n : 1)) return said(SIM_OUT_OF_MEMORY);
  return said(simgpu_pin(*p, n));
}
API cudaFreeHost(void* p) {
  ENTER;
  simgpu_synchronize_device();
  int code = simgpu_unpin(p);
  if (!code) free(p);
  return said(code);
}
API cudaHostRegister(void* p, size_t n, unsigned) { ENTER; return said(simgpu_pin(p, n)); }
API cudaHostUnregister(void* p) { ENTER; return said(simgpu_unpin(p)); }
API cudaMemGetInfo(size_t* available, size_t* total) { ENTER; return said(cuMemGetInfo(available, total)); }
API cudaPointerGetAttributes(cudaPointerAttributes* a, const void* p) {
  ENTER;
  memset(a, 0, sizeof *a);
  int owner = simgpu_owner(p);
  bool pinned = owner < 0 && simgpu_pinned(p);
  a->type = owner >= 0 ? cudaMemoryTypeDevice : pinned ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
  a->device = owner >= 0 ? owner : pinned ? simgpu_current_device() : -2;
  a->devicePointer = owner >= 0 || pinned ? (void*)p : nullptr;
  a->hostPointer = pinned ? (void*)p : nullptr;
  return cudaSuccess;
}
API cudaMemcpy(void* d, const void* s, size_t n, cudaMemcpyKind) { ENTER; return said(simgpu_copy(d, s, n, nullptr, false)); }
API cudaMemcpyAsync(void* d, const void* s, size_t n, cudaMemcpyKind, cudaStream_t t) { ENTER; return said(simgpu_copy(d, s, n, t, true)); }
API cudaMemcpyPeerAsync(void* d, int, const void* s, int, size_t n, cudaStream_t t) { ENTER; return said(simgpu_copy(d, s, n, t, true)); }
API cudaMemset(void* d, int v, size_t n) { ENTER; return said(simgpu_fill(d, v, 1, n, nullptr)); }
API cudaMemsetAsync(void* d, int v, size_t n, cudaStream_t t) { ENTER; return said(simgpu_fill(d, v, 1, n, t)); }

// --- streams and events

API cudaStreamCreate(cudaStream_t* s) { ENTER; *s = (cudaStream_t)simgpu_new_stream(0, true); return cudaSuccess; }
API cudaStreamCreateWithFlags(cudaStream_t* s, unsigned flags) { ENTER; *s = (cudaStream_t)simgpu_new_stream(0, !(flags & cudaStreamNonBlocking)); return cudaSuccess; }
API cudaStreamCreateWithPriority(cudaStream_t* s, unsigned flags, int p) { ENTER; *s = (cudaStream_t)simgpu_new_stream(p, !(flags & cudaStreamNonBlocking)); return cudaSuccess; }
API cudaStreamDestroy(cudaStream_t s) { ENTER; return said(simgpu_free_stream(s)); }
API cudaStreamGetPriority(cudaStream_t s, int* p) { ENTER; *p = simgpu_stream_priority(s); return cudaSuccess; }
API cudaStreamSynchronize(cudaStream_t s) { ENTER; return said(simgpu_synchronize(s, false)); }
API cudaStreamQuery(cudaStream_t s) { ENTER; return said(simgpu_synchronize(s, true)); }
API cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned) { ENTER; return said(simgpu_stream_wait(s, e)); }
API cudaLaunchHostFunc(cudaStream_t s, cudaHostFn_t f, void* data) {
  ENTER;
  int code = simgpu_refuse_in_capture(s, "a function of the host");
  if (!code) code = simgpu_finish(s);
  if (!code) f(data);
  return said(code);
}
API cudaEventCreate(cudaEvent_t* e) { ENTER; *e = (cudaEvent_t)simgpu_new_event(); return cudaSuccess; }
API cudaEventCreateWithFlags(cudaEvent_t* e, unsigned) { ENTER; *e = (cudaEvent_t)simgpu_new_event(); return cudaSuccess; }
API cudaEventDestroy(cudaEvent_t) { ENTER; return cudaSuccess; }  // it is small, and streams may wait for it
API cudaEventRecord(cudaEvent_t e, cudaStream_t s) { ENTER; simgpu_record(e, s); return cudaSuccess; }
API cudaEventRecordWithFlags(cudaEvent_t e, cudaStream_t s, unsigned) { ENTER; simgpu_record(e, s); return cudaSuccess; }
API cudaEventQuery(cudaEvent_t e) { ENTER; return said(simgpu_event_ready(e)); }
API cudaEventSynchronize(cudaEvent_t e) { ENTER; return said(simgpu_event_wait(e)); }
API cudaEventElapsedTime(float* ms, cudaEvent_t a, cudaEvent_t b) { ENTER; return said(simgpu_elapsed(ms, a, b)); }

// --- graphs

static int capture_info(void* s, cudaStreamCaptureStatus* v, unsigned long long* id) {
  unsigned long long number = simgpu_capture(s);
  *v = number ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  if (id) *id = number;
  return SIM_OK;
}
API cudaStreamIsCapturing(cudaStream_t s, cudaStreamCaptureStatus* v) { ENTER; return said(capture_info(s, v, nullptr)); }
#if CUDART_VERSION >= 13000
API cudaStreamGetCaptureInfo(cudaStream_t s, cudaStreamCaptureStatus* v, unsigned long long* id, cudaGraph_t*,
                             const cudaGraphNode_t**, const cudaGraphEdgeData**, size_t*) {
#else
API cudaStreamGetCaptureInfo_v2(cudaStream_t s, cudaStreamCaptureStatus* v, unsigned long long* id, cudaGraph_t*,
                                const cudaGraphNode_t**, size_t*) {
#endif
  ENTER;
  return said(capture_info(s, v, id));
}
API cudaStreamBeginCapture(cudaStream_t s, cudaStreamCaptureMode) { ENTER; return said(simgpu_begin_capture(s)); }
API cudaStreamEndCapture(cudaStream_t s, cudaGraph_t* g) { ENTER; return said(simgpu_end_capture(s, (void**)g)); }
API cudaGraphGetNodes(cudaGraph_t g, cudaGraphNode_t*, size_t* n) { ENTER; *n = simgpu_graph_nodes(g); return cudaSuccess; }
API cudaGraphInstantiateWithFlags(cudaGraphExec_t* e, cudaGraph_t g, unsigned long long) { ENTER; simgpu_share_graph(*e = (cudaGraphExec_t)g); return cudaSuccess; }
API cudaGraphInstantiate(cudaGraphExec_t* e, cudaGraph_t g, unsigned long long flags) { ENTER; return cudaGraphInstantiateWithFlags(e, g, flags); }
API cudaGraphDestroy(cudaGraph_t g) { ENTER; simgpu_free_graph(g); return cudaSuccess; }
API cudaGraphExecDestroy(cudaGraphExec_t e) { ENTER; simgpu_free_graph(e); return cudaSuccess; }
API cudaGraphLaunch(cudaGraphExec_t e, cudaStream_t s) { ENTER; return said(simgpu_launch_graph(e, s)); }
API cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* m) {
  ENTER;
  static thread_local cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
  std::swap(*m, mode);
  return cudaSuccess;
}

// --- kernels in machine code, which cannot be run: who comes here has an operator that is not replaced

static std::unordered_map<const void*, const char*>& kernels() {
  static auto* it = new std::unordered_map<const void*, const char*>;
  return *it;
}
static std::string readable(const char* name) {
  int status = 0;
  char* text = abi::__cxa_demangle(name, nullptr, nullptr, &status);
  std::string result = status ? name : text;
  free(text);
  return result.size() > 300 ? result.substr(0, 300) + " ..." : result;
}

API cudaLaunchKernel(const void* f, dim3, dim3, void**, size_t, cudaStream_t) {
  ENTER;
  auto it = kernels().find(f);
  std::string name = it == kernels().end() ? "(unknown)" : readable(it->second);
  if (name.find("at::cuda::") == 0 && name.find("::spin_kernel(") != name.npos) return cudaSuccess;  // torch.cuda._sleep, which only takes time
  return said(simgpu_fail(SIM_NOT_SUPPORTED, "the CUDA kernel %s is machine code and cannot be run", name.c_str()));
}
API cudaLaunchKernelExC(const cudaLaunchConfig_t* c, const void* f, void** params) { ENTER; return cudaLaunchKernel(f, c->gridDim, c->blockDim, params, 0, c->stream); }
API cudaLaunchCooperativeKernel(const void* f, dim3 g, dim3 b, void** p, size_t n, cudaStream_t s) { ENTER; return cudaLaunchKernel(f, g, b, p, n, s); }
API cudaFuncGetAttributes(cudaFuncAttributes* a, const void*) {
  ENTER;
  memset(a, 0, sizeof *a);
  a->maxThreadsPerBlock = 1024;
  a->numRegs = 64;
  a->binaryVersion = a->ptxVersion = simgpu_arch();
  return cudaSuccess;
}
API cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { ENTER; return cudaSuccess; }
API cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* n, const void*, int, size_t) { ENTER; *n = 1; return cudaSuccess; }
API cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* n, const void*, int, size_t, unsigned) { ENTER; *n = 1; return cudaSuccess; }
API cudaGetDriverEntryPointByVersion(const char* name, void** f, unsigned version, unsigned long long flags, cudaDriverEntryPointQueryResult* found) {
  ENTER;
  if (found) *found = cudaDriverEntryPointSuccess;
  return said(cuGetProcAddress(name, f, (int)version, flags, nullptr));
}

// --- what compiled CUDA code calls when its library is loaded, and when it launches

extern "C" {
void** __cudaRegisterFatBinary(void*) {
  static void* handle;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, void*, void*, void*, void*, int*) { kernels()[host] = name; }
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
char __cudaInitModule(void**) { return 0; }

static thread_local struct { dim3 grid, block; size_t shared; void* stream; } configured;
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void* stream) {
  configured = {grid, block, shared, stream};
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  *grid = configured.grid;
  *block = configured.block;
  *shared = configured.shared;
  *(void**)stream = configured.stream;
  return cudaSuccess;
}
cudaError_t __cudaGetKernel(cudaKernel_t* k, const void* f) {
  *k = (cudaKernel_t)f;
  return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t k, dim3 g, dim3 b, void** p, size_t n, cudaStream_t s) { return cudaLaunchKernel((const void*)k, g, b, p, n, s); }
}
