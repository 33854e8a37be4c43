// cuDNN's version, which PyTorch compares with the one that it was built for; nothing else is simulated.
#include <cstddef>

extern "C" size_t cudnnGetVersion() { return SIMGPU_CUDNN; }
extern "C" size_t cudnnGetCudartVersion() { return 13000; }
extern "C" const char* cudnnGetErrorString(int) { return "not simulated"; }
