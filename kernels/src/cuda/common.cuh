// Shared by all sources; no toolkit headers. Every integer argument is a 64-bit `idx`, every real one a float.

typedef long long idx;

// Which rows or columns of a stored parameter are used, in order: as `blocks.rs`.
constexpr int MAX_BLOCKS = 16;
struct Blocks {
    idx n;
    idx start[MAX_BLOCKS];  // first stored index
    idx at[MAX_BLOCKS];     // first dense index
    idx len[MAX_BLOCKS];
};

// Stored index of a dense one.
__device__ inline idx stored(const Blocks& b, idx dense) {
    for (int i = 0; i < (int)b.n; i++) {
        idx inside = dense - b.at[i];
        if (inside < b.len[i]) return b.start[i] + inside;
    }
    return 0;
}

// V floats that are read and written as one.
template <int V> struct Vec;
template <> struct Vec<1> {
    float v[1];
    __device__ static Vec load(const float* p) { return {{*p}}; }
    __device__ void store(float* p) const { *p = v[0]; }
};
template <> struct Vec<4> {
    float v[4];
    __device__ static Vec load(const float* p) {
        float4 x = *reinterpret_cast<const float4*>(p);
        return {{x.x, x.y, x.z, x.w}};
    }
    __device__ void store(float* p) const { *reinterpret_cast<float4*>(p) = make_float4(v[0], v[1], v[2], v[3]); }
};

// Calls f(row, first column) for groups of V columns of [rows, cols]; a grid of (columns / V, rows) walks both.
template <int V, class F> __device__ inline void each(idx rows, idx cols, F f) {
    for (idx r = blockIdx.y; r < rows; r += gridDim.y)
        for (idx c = ((idx)blockIdx.x * blockDim.x + threadIdx.x) * V; c < cols; c += (idx)gridDim.x * blockDim.x * V)
            f(r, c);
}

// Sum over the block in a fixed order; every thread gets it. The block has whole warps, at most 32.
__device__ inline float block_sum(float x) {
    __shared__ float warps[32];
    for (int d = 16; d > 0; d >>= 1) x += __shfl_xor_sync(0xffffffffu, x, d);
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, n = blockDim.x >> 5;
    __syncthreads();  // `warps` may still be read from the sum before
    if (lane == 0) warps[warp] = x;
    __syncthreads();
    x = lane < n ? warps[lane] : 0.0f;
    for (int d = 16; d > 0; d >>= 1) x += __shfl_xor_sync(0xffffffffu, x, d);
    return x;
}
