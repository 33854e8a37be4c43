// What NCCL's calls are made of, and sums of what the ranks give.
#pragma once
#include "sim.h"

constexpr size_t SLOT = 1 << 20;  // bytes that travel at a time
constexpr int RANKS = 16;

enum Result { OK = 0, SYSTEM = 2, ARGUMENT = 4, USAGE = 5, REMOTE = 6 };
enum Op { SUM, PRODUCT, MAX, MIN, AVERAGE, OPS };
enum Type { I8, U8, I32, U32, I64, U64, F16, F32, F64, BF16, FP8A, FP8B };

/// What a rank asks for: all ranks must ask for the same.
struct Call {
  char what[112];
  char line[400];  // of Python
};

size_t width(int type);
/// Reduces what all ranks have put into their slots.
int reduce(const char* slots, int ranks, void* out, size_t n, int type, int op);
