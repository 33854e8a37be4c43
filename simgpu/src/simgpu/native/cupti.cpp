// The profiler's library is not simulated; PyTorch asks it to say so.
extern "C" int cuptiGetResultString(int, const char** text) {
  *text = "simgpu: CUPTI, which profiles, is not simulated";
  return 0;
}
