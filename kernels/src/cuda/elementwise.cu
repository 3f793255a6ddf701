// Element-wise kernels on [rows, cols] operands with row strides.

// y = a op b (0 add, 1 subtract, 2 multiply), added to y when acc.
template <int V>
__device__ inline void binary(const float* a, const float* b, float* y, idx rows, idx cols, idx ld_a, idx ld_b,
                              idx ld_y, idx op, idx acc) {
    each<V>(rows, cols, [&](idx r, idx c) {
        auto va = Vec<V>::load(a + r * ld_a + c), vb = Vec<V>::load(b + r * ld_b + c);
        Vec<V> vy;
        if (acc) vy = Vec<V>::load(y + r * ld_y + c);
        for (int i = 0; i < V; i++) {
            float x = op == 0 ? va.v[i] + vb.v[i] : op == 1 ? va.v[i] - vb.v[i] : va.v[i] * vb.v[i];
            vy.v[i] = acc ? vy.v[i] + x : x;
        }
        vy.store(y + r * ld_y + c);
    });
}

extern "C" __global__ void binary_1(const float* a, const float* b, float* y, idx rows, idx cols, idx ld_a, idx ld_b,
                                    idx ld_y, idx op, idx acc) {
    binary<1>(a, b, y, rows, cols, ld_a, ld_b, ld_y, op, acc);
}
extern "C" __global__ void binary_4(const float* a, const float* b, float* y, idx rows, idx cols, idx ld_a, idx ld_b,
                                    idx ld_y, idx op, idx acc) {
    binary<4>(a, b, y, rows, cols, ld_a, ld_b, ld_y, op, acc);
}

// y = factor * s * x, added to y when acc; s is null for 1. x may be y.
template <int V>
__device__ inline void scale(const float* x, const float* s, float* y, idx rows, idx cols, idx ld_x, idx ld_y,
                             float factor, idx acc) {
    float by = s ? factor * *s : factor;
    each<V>(rows, cols, [&](idx r, idx c) {
        auto v = Vec<V>::load(x + r * ld_x + c);
        for (int i = 0; i < V; i++) v.v[i] *= by;
        if (acc) {
            auto old = Vec<V>::load(y + r * ld_y + c);
            for (int i = 0; i < V; i++) v.v[i] += old.v[i];
        }
        v.store(y + r * ld_y + c);
    });
}

extern "C" __global__ void scale_1(const float* x, const float* s, float* y, idx rows, idx cols, idx ld_x, idx ld_y,
                                   float factor, idx acc) {
    scale<1>(x, s, y, rows, cols, ld_x, ld_y, factor, acc);
}
extern "C" __global__ void scale_4(const float* x, const float* s, float* y, idx rows, idx cols, idx ld_x, idx ld_y,
                                   float factor, idx acc) {
    scale<4>(x, s, y, rows, cols, ld_x, ld_y, factor, acc);
}

// y = value.
template <int V> __device__ inline void fill(float* y, idx rows, idx cols, idx ld, float value) {
    Vec<V> v;
    for (int i = 0; i < V; i++) v.v[i] = value;
    each<V>(rows, cols, [&](idx r, idx c) { v.store(y + r * ld + c); });
}

extern "C" __global__ void fill_1(float* y, idx rows, idx cols, idx ld, float value) { fill<1>(y, rows, cols, ld, value); }
extern "C" __global__ void fill_4(float* y, idx rows, idx cols, idx ld, float value) { fill<4>(y, rows, cols, ld, value); }
