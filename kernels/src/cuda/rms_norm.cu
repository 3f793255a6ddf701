// RMS norm as in cpu/rms_norm.rs: y = x rstd w s, rstd = 1 / sqrt(sum_c x^2 / width + eps e); e and s null for 1.
// A block takes whole rows.

template <int V>
__device__ inline void forward(const float* x, const float* w, const float* e, const float* s, float* y, float* rstd,
                               idx rows, idx cols, idx ld_x, idx ld_y, float inv_width, float eps,
                               const Blocks& blocks) {
    if (e) eps *= *e;
    float out_scale = s ? *s : 1.0f;
    for (idx r = blockIdx.x; r < rows; r += gridDim.x) {
        const float* row = x + r * ld_x;
        float sum = 0.0f;
        for (idx c = (idx)threadIdx.x * V; c < cols; c += (idx)blockDim.x * V) {
            auto v = Vec<V>::load(row + c);
            for (int i = 0; i < V; i++) sum += v.v[i] * v.v[i];
        }
        float by = 1.0f / sqrtf(block_sum(sum) * inv_width + eps);
        if (threadIdx.x == 0) rstd[r] = by;
        by *= out_scale;
        for (idx c = (idx)threadIdx.x * V; c < cols; c += (idx)blockDim.x * V) {
            auto v = Vec<V>::load(row + c), weight = Vec<V>::load(w + stored(blocks, c));
            for (int i = 0; i < V; i++) v.v[i] = v.v[i] * by * weight.v[i];
            v.store(y + r * ld_y + c);
        }
    }
}

extern "C" __global__ void rms_norm_1(const float* x, const float* w, const float* e, const float* s, float* y,
                                      float* rstd, idx rows, idx cols, idx ld_x, idx ld_y, float inv_width, float eps,
                                      Blocks blocks) {
    forward<1>(x, w, e, s, y, rstd, rows, cols, ld_x, ld_y, inv_width, eps, blocks);
}
extern "C" __global__ void rms_norm_4(const float* x, const float* w, const float* e, const float* s, float* y,
                                      float* rstd, idx rows, idx cols, idx ld_x, idx ld_y, float inv_width, float eps,
                                      Blocks blocks) {
    forward<4>(x, w, e, s, y, rstd, rows, cols, ld_x, ld_y, inv_width, eps, blocks);
}

// dx = rstd g - x rstd^3 / width * sum_c(g x) with g = dy w s, added to dx when acc.
template <int V>
__device__ inline void backward(const float* dy, const float* x, const float* rstd, const float* w, const float* s,
                                float* dx, idx rows, idx cols, idx ld_dy, idx ld_x, idx ld_dx, float inv_width,
                                idx acc, const Blocks& blocks) {
    float out_scale = s ? *s : 1.0f;
    for (idx r = blockIdx.x; r < rows; r += gridDim.x) {
        const float *g = dy + r * ld_dy, *row = x + r * ld_x;
        float sum = 0.0f;
        for (idx c = (idx)threadIdx.x * V; c < cols; c += (idx)blockDim.x * V) {
            auto vg = Vec<V>::load(g + c), vx = Vec<V>::load(row + c), weight = Vec<V>::load(w + stored(blocks, c));
            for (int i = 0; i < V; i++) sum += vg.v[i] * vx.v[i] * weight.v[i];
        }
        float by = rstd[r];
        float along_x = by * by * by * inv_width * block_sum(sum) * out_scale, along_g = by * out_scale;
        for (idx c = (idx)threadIdx.x * V; c < cols; c += (idx)blockDim.x * V) {
            auto vg = Vec<V>::load(g + c), vx = Vec<V>::load(row + c), weight = Vec<V>::load(w + stored(blocks, c));
            for (int i = 0; i < V; i++) vg.v[i] = vg.v[i] * weight.v[i] * along_g - vx.v[i] * along_x;
            if (acc) {
                auto old = Vec<V>::load(dx + r * ld_dx + c);
                for (int i = 0; i < V; i++) vg.v[i] += old.v[i];
            }
            vg.store(dx + r * ld_dx + c);
        }
    }
}

extern "C" __global__ void rms_norm_backward_1(const float* dy, const float* x, const float* rstd, const float* w,
                                               const float* s, float* dx, idx rows, idx cols, idx ld_dy, idx ld_x,
                                               idx ld_dx, float inv_width, idx acc, Blocks blocks) {
    backward<1>(dy, x, rstd, w, s, dx, rows, cols, ld_dy, ld_x, ld_dx, inv_width, acc, blocks);
}
extern "C" __global__ void rms_norm_backward_4(const float* dy, const float* x, const float* rstd, const float* w,
                                               const float* s, float* dx, idx rows, idx cols, idx ld_dy, idx ld_x,
                                               idx ld_dx, float inv_width, idx acc, Blocks blocks) {
    backward<4>(dy, x, rstd, w, s, dx, rows, cols, ld_dy, ld_x, ld_dx, inv_width, acc, blocks);
}

// work[part, c] = sum of dy x rstd over the part's rows. Grid (columns / 32, parts), blocks of 32 x 8: thread (i, j) adds
// rows j, j + 8, ... of its column, then the 8 partial sums are added in order.
extern "C" __global__ void rms_norm_weight_parts(const float* dy, const float* x, const float* rstd, float* work,
                                                 idx rows, idx cols, idx ld_dy, idx ld_x, idx rows_per_part) {
    __shared__ float parts[8][33];
    idx c = (idx)blockIdx.x * 32 + threadIdx.x;
    idx begin = (idx)blockIdx.y * rows_per_part, end = begin + rows_per_part;
    if (end > rows) end = rows;
    float sum = 0.0f;
    if (c < cols)
        for (idx r = begin + threadIdx.y; r < end; r += 8) sum += dy[r * ld_dy + c] * (x[r * ld_x + c] * rstd[r]);
    parts[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y == 0 && c < cols) {
        float total = 0.0f;
        for (int j = 0; j < 8; j++) total += parts[j][threadIdx.x];
        work[(idx)blockIdx.y * cols + c] = total;
    }
}

// dw[stored c] += s * sum over parts, which also replaces part 0 for rms_norm_scale.
extern "C" __global__ void rms_norm_weight(float* work, const float* s, float* dw, idx parts, idx cols,
                                           Blocks blocks) {
    idx c = (idx)blockIdx.x * blockDim.x + threadIdx.x;
    if (c >= cols) return;
    float total = 0.0f;
    for (idx p = 0; p < parts; p++) total += work[p * cols + c];
    work[c] = total;
    dw[stored(blocks, c)] += s ? total * *s : total;
}

// ds += sum over c of total[c] w[stored c]. One block.
extern "C" __global__ void rms_norm_scale(const float* total, const float* w, float* ds, idx cols, Blocks blocks) {
    float sum = 0.0f;
    for (idx c = threadIdx.x; c < cols; c += blockDim.x) sum += total[c] * w[stored(blocks, c)];
    sum = block_sum(sum);
    if (threadIdx.x == 0) *ds += sum;
}
