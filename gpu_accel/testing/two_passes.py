"""A candidate of two kernels in CUDA C++, for tests: sums of 64 blocks, and their sum."""

CUDA = """// /// launch
// task = "reduction"
// grid = [64]
// entry = "part"
// args = ["x", "parts", "n"]
// block = [256]
// [workspace.parts]
// shape = [64]
// [[then]]
// entry = "finish"
// grid = [1]
// args = ["parts", "out"]
// block = [32]
// ///
extern "C" __global__ void part(const float* x, float* parts, long long n) {
    __shared__ float kept[256];
    float sum = 0;
    for (long long i = blockIdx.x * 256LL + threadIdx.x; i < n; i += 64 * 256LL) sum += x[i];
    kept[threadIdx.x] = sum;
    __syncthreads();
    for (int away = 128; away; away /= 2) {
        if (threadIdx.x < away) kept[threadIdx.x] += kept[threadIdx.x + away];
        __syncthreads();
    }
    if (threadIdx.x == 0) parts[blockIdx.x] = kept[0];
}
extern "C" __global__ void finish(const float* parts, float* out) {
    float sum = parts[threadIdx.x] + parts[threadIdx.x + 32];
    for (int away = 16; away; away /= 2) sum += __shfl_xor_sync(~0u, sum, away);
    if (threadIdx.x == 0) *out = sum;
}
"""
