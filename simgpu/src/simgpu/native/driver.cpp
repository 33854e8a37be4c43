// The driver's API. The header gives functions the names of their newest versions.
#include <cuda.h>
#include <dlfcn.h>
#include <elf.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <string>

#include "graph.h"
#include "sim.h"

#define API extern "C" CUresult CUDAAPI
#define ENTER SIM_ENTER(CUresult)

static CUresult said(int code) { return (CUresult)code; }
static CUdeviceptr number(const void* p) { return (CUdeviceptr)p; }
static void* pointer(CUdeviceptr p) { return (void*)p; }

// --- devices and their primary contexts

struct CUctx_st { int device; };
static CUctx_st contexts[64];
static thread_local bool has_context = false;

static CUcontext context(int device) {
  contexts[device].device = device;
  return &contexts[device];
}

API cuInit(unsigned) { ENTER; return said(simgpu_devices() ? SIM_OK : SIM_NO_DEVICE); }
API cuDriverGetVersion(int* v) { ENTER; *v = CUDA_VERSION; return said(SIM_OK); }
API cuDeviceGetCount(int* n) { ENTER; *n = simgpu_devices(); return said(SIM_OK); }
API cuDeviceGet(CUdevice* d, int i) { ENTER; *d = i; return said(i < simgpu_devices() ? SIM_OK : SIM_INVALID_DEVICE); }
API cuDeviceGetName(char* name, int n, CUdevice) { ENTER; snprintf(name, n, "Simulated GPU sm_%d", simgpu_arch()); return said(SIM_OK); }
API cuDeviceTotalMem(size_t* n, CUdevice) { ENTER; *n = simgpu_capacity(); return said(SIM_OK); }
API cuDeviceGetUuid(CUuuid* id, CUdevice d) { ENTER; snprintf(id->bytes, sizeof id->bytes, "simgpu-%d", d); return said(SIM_OK); }
API cuDeviceGetAttribute(int* v, CUdevice_attribute a, CUdevice) { ENTER; *v = simgpu_attribute(a); return said(SIM_OK); }

API cuDevicePrimaryCtxRetain(CUcontext* c, CUdevice d) { ENTER; *c = context(d); return said(SIM_OK); }
API cuDevicePrimaryCtxRelease(CUdevice) { ENTER; return said(SIM_OK); }
API cuDevicePrimaryCtxGetState(CUdevice d, unsigned* flags, int* active) {
  ENTER;
  if (flags) *flags = 0;
  *active = simgpu_used(d) > 0;
  return said(SIM_OK);
}
API cuCtxGetCurrent(CUcontext* c) {
  ENTER;
  bool runtime = simgpu_used(simgpu_current_device()) > 0;  // its calls have made the context
  *c = has_context || runtime ? context(simgpu_current_device()) : nullptr;
  return said(SIM_OK);
}
API cuCtxSetCurrent(CUcontext c) {
  ENTER;
  has_context = c != nullptr;
  return said(c ? simgpu_set_device(c->device) : SIM_OK);
}
API cuCtxGetDevice(CUdevice* d) { ENTER; *d = simgpu_current_device(); return said(SIM_OK); }
API cuCtxSynchronize() { ENTER; simgpu_count("wait"); simgpu_where(true); return said(simgpu_synchronize_device()); }
API cuCtxGetLimit(size_t* v, CUlimit) { ENTER; *v = 1 << 20; return said(SIM_OK); }
API cuCtxSetLimit(CUlimit, size_t) { ENTER; return said(SIM_OK); }

API cuGetErrorString(CUresult e, const char** s) { *s = simgpu_error_text(e); return said(SIM_OK); }
API cuGetErrorName(CUresult e, const char** s) { *s = simgpu_error_text(e); return said(SIM_OK); }

// --- memory

API cuMemGetInfo(size_t* available, size_t* total) {
  ENTER;
  *total = simgpu_capacity();
  *available = *total - simgpu_used(simgpu_current_device());
  return said(SIM_OK);
}
API cuMemAlloc(CUdeviceptr* p, size_t n) { ENTER; return said(simgpu_allocate(n, (void**)p)); }
API cuMemFree(CUdeviceptr p) { ENTER; return said(simgpu_release(pointer(p))); }
API cuMemcpyHtoD(CUdeviceptr d, const void* s, size_t n) { ENTER; return said(simgpu_copy(pointer(d), s, n, nullptr, false)); }
API cuMemcpyDtoH(void* d, CUdeviceptr s, size_t n) { ENTER; return said(simgpu_copy(d, pointer(s), n, nullptr, false)); }
API cuMemcpyHtoDAsync(CUdeviceptr d, const void* s, size_t n, CUstream t) { ENTER; return said(simgpu_copy(pointer(d), s, n, t, true)); }
API cuMemcpyDtoHAsync(void* d, CUdeviceptr s, size_t n, CUstream t) { ENTER; return said(simgpu_copy(d, pointer(s), n, t, true)); }
API cuMemcpyDtoDAsync(CUdeviceptr d, CUdeviceptr s, size_t n, CUstream t) { ENTER; return said(simgpu_copy(pointer(d), pointer(s), n, t, true)); }
API cuMemsetD8Async(CUdeviceptr d, unsigned char v, size_t n, CUstream t) { ENTER; return said(simgpu_fill(pointer(d), v, 1, n, t)); }
API cuMemsetD32Async(CUdeviceptr d, unsigned v, size_t n, CUstream t) { ENTER; return said(simgpu_fill(pointer(d), v, 4, n, t)); }

API cuPointerGetAttribute(void* out, CUpointer_attribute a, CUdeviceptr p) {
  ENTER;
  int owner = simgpu_owner(pointer(p)), device = owner < 0 ? 0 : owner;
  if (owner < 0 && !simgpu_pinned(pointer(p))) return said(SIM_INVALID_VALUE);
  switch ((int)a) {
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER: *(CUdeviceptr*)out = p; break;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE: *(unsigned*)out = owner < 0 ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE; break;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: *(int*)out = device; break;
    case CU_POINTER_ATTRIBUTE_CONTEXT: *(CUcontext*)out = context(device); break;
    case CU_POINTER_ATTRIBUTE_IS_MANAGED: *(unsigned*)out = 0; break;
    default: return said(simgpu_fail(SIM_NOT_SUPPORTED, "attribute %d of cuPointerGetAttribute is not simulated", (int)a));
  }
  return said(SIM_OK);
}

// --- modules: PTX, or an ELF file behind which the wrapper of the assembler put the PTX it came from

struct Module { std::string ptx; };
struct Function {
  Module* module;
  std::string name;
  int dynamic = 48 << 10;  // bytes of shared memory that a launch may ask for
};
static const char MARK[] = "\n//SIMGPU-PTX\n";

/// The size of an ELF file, from its own tables.
static size_t elf_size(const char* data) {
  auto* head = (const Elf64_Ehdr*)data;
  auto* sections = (const Elf64_Shdr*)(data + head->e_shoff);
  size_t end = head->e_shoff + (size_t)head->e_shnum * head->e_shentsize;
  end = std::max<size_t>(end, head->e_phoff + (size_t)head->e_phnum * head->e_phentsize);
  for (int i = 0; i < head->e_shnum; ++i)
    if (sections[i].sh_type != SHT_NOBITS) end = std::max<size_t>(end, sections[i].sh_offset + sections[i].sh_size);
  return end;
}

API cuModuleLoadData(CUmodule* m, const void* image) {
  ENTER;
  auto* data = (const char*)image;
  if (!memcmp(data, ELFMAG, SELFMAG)) {
    data += elf_size(data);
    if (strncmp(data, MARK, sizeof MARK - 1)) return said(simgpu_fail(SIM_NOT_SUPPORTED, "a module without PTX is machine code and cannot be run"));
    data += sizeof MARK - 1;
  }
  *m = (CUmodule) new Module{data};
  return said(SIM_OK);
}
API cuModuleLoadDataEx(CUmodule* m, const void* image, unsigned, CUjit_option*, void**) { ENTER; return cuModuleLoadData(m, image); }
API cuModuleLoad(CUmodule* m, const char* path) {
  ENTER;
  FILE* file = fopen(path, "rb");
  if (!file) return said(simgpu_fail(301, "there is no module %s", path));
  std::string text;
  char part[1 << 16];
  for (size_t n; (n = fread(part, 1, sizeof part, file)) > 0;) text.append(part, n);
  fclose(file);
  return cuModuleLoadData(m, text.c_str());
}
API cuModuleUnload(CUmodule) { ENTER; return said(SIM_OK); }  // small, and kernels name it
API cuModuleGetFunction(CUfunction* f, CUmodule m, const char* name) {
  ENTER;
  auto* module = (Module*)m;
  if (module->ptx.find(std::string(name) + "(") == std::string::npos) return said(simgpu_fail(SIM_NOT_FOUND, "no kernel %s in the module", name));
  *f = (CUfunction) new Function{module, name};
  return said(SIM_OK);
}
API cuFuncGetAttribute(int* v, CUfunction_attribute a, CUfunction f) {
  ENTER;
  switch ((int)a) {
    case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK: *v = 1024; break;
    case CU_FUNC_ATTRIBUTE_NUM_REGS: *v = 64; break;  // the assembler's result is not looked into
    case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES: *v = ((Function*)f)->dynamic; break;
    case CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES:
    case CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES: *v = 0; break;
    default: return said(simgpu_fail(SIM_NOT_SUPPORTED, "attribute %d of cuFuncGetAttribute is not simulated", (int)a));
  }
  return said(SIM_OK);
}
API cuFuncSetAttribute(CUfunction f, CUfunction_attribute a, int v) {
  ENTER;
  if (a != CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES) return said(SIM_OK);
  if (v > simgpu_attribute(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)) return said(SIM_INVALID_VALUE);
  ((Function*)f)->dynamic = v;
  return said(SIM_OK);
}
API cuFuncSetCacheConfig(CUfunction, CUfunc_cache) { ENTER; return said(SIM_OK); }
API cuOccupancyMaxActiveBlocksPerMultiprocessor(int* n, CUfunction, int, size_t) { ENTER; *n = 1; return said(SIM_OK); }

static int (*launcher)(const SimLaunch*) = nullptr;
static int (*again)(int, void*) = nullptr;
/// Sets what Python does: a launch, and, with each launch of a graph, what it has kept by a number.
extern "C" void simgpu_set_python(int (*run)(const SimLaunch*), int (*run_again)(int, void*)) {
  launcher = run;
  again = run_again;
}
extern "C" void simgpu_keep_python(void* stream, int number) {
  simgpu_keep(stream, [number](void* now) { return again(number, now); });
}

API cuLaunchKernel(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, CUstream s, void** params, void** extra) {
  ENTER;
  auto* function = (Function*)f;
  const char* name = function->name.c_str();
  bool empty = !gx || !gy || !gz || !bx || !by || !bz;
  if (empty || gx > 0x7FFFFFFF || gy > 0xFFFF || gz > 0xFFFF || bx * by * bz > 1024)
    return said(simgpu_fail(SIM_INVALID_VALUE, "%s: no GPU takes the grid (%u, %u, %u) of (%u, %u, %u)", name, gx, gy, gz, bx, by, bz));
  if ((int)shared > function->dynamic) return said(simgpu_fail(SIM_INVALID_VALUE, "%s: %u bytes of shared memory, %d allowed", name, shared, function->dynamic));
  if (extra || !launcher) return said(simgpu_fail(SIM_NOT_SUPPORTED, "%s: launched without Python or with packed parameters", name));
  SimLaunch it{function->module->ptx.c_str(), name, {gx, gy, gz}, {bx, by, bz}, shared, params, s};
  return said(launcher(&it));
}
API cuLaunchKernelEx(const CUlaunchConfig* c, CUfunction f, void** params, void** extra) {
  ENTER;
  return cuLaunchKernel(f, c->gridDimX, c->gridDimY, c->gridDimZ, c->blockDimX, c->blockDimY, c->blockDimZ,
                        c->sharedMemBytes, c->hStream, params, extra);
}
API cuLaunchCooperativeKernel(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared, CUstream s, void** params) {
  ENTER;
  return cuLaunchKernel(f, gx, gy, gz, bx, by, bz, shared, s, params, nullptr);
}

// --- streams and events, as far as others than the runtime ask for them

API cuStreamSynchronize(CUstream s) { ENTER; return said(simgpu_synchronize(s, false)); }
API cuStreamGetCtx(CUstream s, CUcontext* c) { ENTER; *c = context(simgpu_stream_device(s)); return said(SIM_OK); }
API cuStreamIsCapturing(CUstream s, CUstreamCaptureStatus* v) { ENTER; *v = simgpu_capture(s) ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_NONE; return said(SIM_OK); }

// --- entries by name

static CUresult missing() { return said(SIM_NOT_SUPPORTED); }
API cuGetProcAddress(const char* name, void** f, int, cuuint64_t, CUdriverProcAddressQueryResult* found) {
  ENTER;
  static void* self = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
  *f = dlsym(self, (std::string(name) + "_v2").c_str());
  if (!*f) *f = dlsym(self, name);
  if (!*f) *f = (void*)missing;  // torch asks for many and calls few
  if (found) *found = CU_GET_PROC_ADDRESS_SUCCESS;
  return said(SIM_OK);
}
