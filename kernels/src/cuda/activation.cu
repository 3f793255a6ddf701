// Activations as in cpu/activation.rs: y = act(x) w[t], w null for 1. Kinds: 0 squared ReLU, 1 GELU (tanh form),
// 2 SiLU, 3 leaky ReLU (slope 0: ReLU).

__device__ inline float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

struct Both {
    float value, slope;
};

__device__ inline Both act(float x, idx kind, float slope) {
    switch (kind) {
        case 0: {
            float p = x < 0.0f ? 0.0f : x;
            return {p * p, p + p};
        }
        case 1: {
            const float a = 0.7978845608028654f, b = 0.044715f;
            float square = x * x, t = tanhf(a * (x + b * square * x));
            return {0.5f * x * (1.0f + t),
                    0.5f * (1.0f + t) + 0.5f * x * (1.0f - t * t) * (a * (1.0f + 3.0f * b * square))};
        }
        case 2: {
            float s = sigmoid(x);
            return {x * s, s * (1.0f + x * (1.0f - s))};
        }
        default: {
            float by = x > 0.0f ? 1.0f : slope;
            return {x * by, by};
        }
    }
}

template <int V>
__device__ inline void forward(const float* x, const float* w, float* y, idx rows, idx cols, idx ld_x, idx ld_y,
                               idx kind, float slope) {
    each<V>(rows, cols, [&](idx r, idx c) {
        auto v = Vec<V>::load(x + r * ld_x + c);
        float by = w ? w[r] : 1.0f;
        for (int i = 0; i < V; i++) v.v[i] = act(v.v[i], kind, slope).value * by;
        v.store(y + r * ld_y + c);
    });
}

extern "C" __global__ void activation_1(const float* x, const float* w, float* y, idx rows, idx cols, idx ld_x,
                                        idx ld_y, idx kind, float slope) {
    forward<1>(x, w, y, rows, cols, ld_x, ld_y, kind, slope);
}
extern "C" __global__ void activation_4(const float* x, const float* w, float* y, idx rows, idx cols, idx ld_x,
                                        idx ld_y, idx kind, float slope) {
    forward<4>(x, w, y, rows, cols, ld_x, ld_y, kind, slope);
}

// dx = dy act'(x), added to dx when acc.
template <int V>
__device__ inline void backward(const float* dy, const float* x, float* dx, idx rows, idx cols, idx ld_dy, idx ld_x,
                                idx ld_dx, idx kind, float slope, idx acc) {
    each<V>(rows, cols, [&](idx r, idx c) {
        auto g = Vec<V>::load(dy + r * ld_dy + c), v = Vec<V>::load(x + r * ld_x + c);
        for (int i = 0; i < V; i++) v.v[i] = g.v[i] * act(v.v[i], kind, slope).slope;
        if (acc) {
            auto old = Vec<V>::load(dx + r * ld_dx + c);
            for (int i = 0; i < V; i++) v.v[i] += old.v[i];
        }
        v.store(dx + r * ld_dx + c);
    });
}

extern "C" __global__ void activation_backward_1(const float* dy, const float* x, float* dx, idx rows, idx cols,
                                                 idx ld_dy, idx ld_x, idx ld_dx, idx kind, float slope, idx acc) {
    backward<1>(dy, x, dx, rows, cols, ld_dy, ld_x, ld_dx, kind, slope, acc);
}
extern "C" __global__ void activation_backward_4(const float* dy, const float* x, float* dx, idx rows, idx cols,
                                                 idx ld_dy, idx ld_x, idx ld_dx, idx kind, float slope, idx acc) {
    backward<4>(dy, x, dx, rows, cols, ld_dy, ld_x, ld_dx, kind, slope, acc);
}

// As above with row weights: dx = dy w[t] act'(x), and dw[t] = sum_c dy act(x). A block takes whole rows.
extern "C" __global__ void activation_backward_weighted(const float* dy, const float* x, const float* w, float* dx,
                                                        float* dw, idx rows, idx cols, idx ld_dy, idx ld_x, idx ld_dx,
                                                        idx kind, float slope, idx acc, idx acc_weight) {
    for (idx r = blockIdx.x; r < rows; r += gridDim.x) {
        float by = w[r], sum = 0.0f;
        for (idx c = threadIdx.x; c < cols; c += blockDim.x) {
            float g = dy[r * ld_dy + c];
            Both f = act(x[r * ld_x + c], kind, slope);
            float* to = dx + r * ld_dx + c;
            float d = g * by * f.slope;
            *to = acc ? *to + d : d;
            sum += g * f.value;
        }
        sum = block_sum(sum);
        if (threadIdx.x == 0) dw[r] = acc_weight ? dw[r] + sum : sum;
    }
}
