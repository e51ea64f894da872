#include "tests/bench/empty_kernel.h"

namespace ringattn::worker {
namespace {

__global__ void empty_kernel() {}

}  // namespace

const void* EmptyKernel() { return reinterpret_cast<const void*>(&empty_kernel); }

}  // namespace ringattn::worker
