// The sums of NCCL's collectives, made in the order of the ranks.
#include <algorithm>
#include <cstring>

#include "nccl.h"

namespace {

struct Half {
  using Wide = float;
  _Float16 bits;
  operator float() const { return (float)bits; }
  Half& operator=(float x) { return bits = (_Float16)x, *this; }
};
struct BFloat {
  using Wide = float;
  uint16_t bits;
  operator float() const {
    uint32_t whole = (uint32_t)bits << 16;
    float x;
    return memcpy(&x, &whole, 4), x;
  }
  BFloat& operator=(float x) {
    uint32_t whole;
    memcpy(&whole, &x, 4);
    bits = x != x ? 0x7FFF : (uint16_t)((whole + 0x7FFF + (whole >> 16 & 1)) >> 16);
    return *this;
  }
};

/// Reduces what all ranks have put into their slots; 16 bits are summed in float.
template <class T, class Wide>
void reduce_as(const char* slots, int ranks, void* out, size_t n, int op) {
  for (size_t i = 0; i < n; ++i) {
    Wide all = (Wide)((const T*)slots)[i];
    for (int r = 1; r < ranks; ++r) {
      Wide next = (Wide)((const T*)(slots + r * SLOT))[i];
      switch (op) {
        case PRODUCT: all = all * next; break;
        case MAX: all = std::max(all, next); break;
        case MIN: all = std::min(all, next); break;
        default: all = all + next;
      }
    }
    ((T*)out)[i] = op == AVERAGE ? all / (Wide)ranks : all;
  }
}

}  // namespace

size_t width(int type) {
  static const size_t bytes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
  return bytes[type];
}

int reduce(const char* slots, int ranks, void* out, size_t n, int type, int op) {
  if (op >= OPS) return simgpu_fail(USAGE, "NCCL's reduction %d is not simulated", op);
  switch (type) {
    case I8: reduce_as<int8_t, int8_t>(slots, ranks, out, n, op); return OK;
    case U8: reduce_as<uint8_t, uint8_t>(slots, ranks, out, n, op); return OK;
    case I32: reduce_as<int32_t, int32_t>(slots, ranks, out, n, op); return OK;
    case U32: reduce_as<uint32_t, uint32_t>(slots, ranks, out, n, op); return OK;
    case I64: reduce_as<int64_t, int64_t>(slots, ranks, out, n, op); return OK;
    case U64: reduce_as<uint64_t, uint64_t>(slots, ranks, out, n, op); return OK;
    case F16: reduce_as<Half, float>(slots, ranks, out, n, op); return OK;
    case F32: reduce_as<float, float>(slots, ranks, out, n, op); return OK;
    case F64: reduce_as<double, double>(slots, ranks, out, n, op); return OK;
    case BF16: reduce_as<BFloat, float>(slots, ranks, out, n, op); return OK;
  }
  return simgpu_fail(ARGUMENT, "NCCL's reduction of type %d is not simulated", type);
}
