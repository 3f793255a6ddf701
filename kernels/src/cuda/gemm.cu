// What a linear layer needs beside its matrix products.

// y[t, c] = bias[stored c], or y += when acc. Grid (columns, rows).
extern "C" __global__ void bias_rows(const float* bias, float* y, idx rows, idx cols, idx ld_y, idx acc,
                                     Blocks blocks) {
    for (idx c = (idx)blockIdx.x * blockDim.x + threadIdx.x; c < cols; c += (idx)gridDim.x * blockDim.x) {
        float b = bias[stored(blocks, c)];
        for (idx r = blockIdx.y; r < rows; r += gridDim.y) {
            float* to = y + r * ld_y + c;
            *to = acc ? *to + b : b;
        }
    }
}

// out[stored c] += sum over rows of x[row, c]. Blocks of 32 columns by 32 rows: thread (i, j) adds rows j, j + 32, ... of
// its column, then the 32 partial sums are added in order.
extern "C" __global__ void column_sums(const float* x, float* out, idx rows, idx cols, idx ld, Blocks blocks) {
    __shared__ float parts[32][33];
    idx c = (idx)blockIdx.x * 32 + threadIdx.x;
    float sum = 0.0f;
    if (c < cols)
        for (idx r = threadIdx.y; r < rows; r += 32) sum += x[r * ld + c];
    parts[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y == 0 && c < cols) {
        float total = 0.0f;
        for (int j = 0; j < 32; j++) total += parts[j][threadIdx.x];
        out[stored(blocks, c)] += total;
    }
}
