// What CUDA C has and WGSL does not: integers and floats of 64 bits, and arithmetic as IEEE 754 defines it. These
// functions replace the functions of the same names in the shared library.

// 64-bit integers, signed ones as their bits.
DEVICE word2 pair(unsigned low, unsigned high) { return (word2)high << 32 | low; }
DEVICE unsigned low(word2 a) { return (unsigned)a; }
DEVICE unsigned high(word2 a) { return (unsigned)(a >> 32); }
DEVICE word2 pair_of_i32(int a) { return (word2)(long long)a; }
DEVICE word2 pair_of_u32(unsigned a) { return a; }
DEVICE bool is_zero_pair(word2 a) { return a == 0; }
DEVICE word2 add_pair(word2 a, word2 b) { return a + b; }
DEVICE word2 sub_pair(word2 a, word2 b) { return a - b; }
DEVICE word2 mul_pair(word2 a, word2 b) { return a * b; }
DEVICE word2 neg_pair(word2 a) { return 0 - a; }
DEVICE word2 and_pair(word2 a, word2 b) { return a & b; }
DEVICE word2 or_pair(word2 a, word2 b) { return a | b; }
DEVICE word2 xor_pair(word2 a, word2 b) { return a ^ b; }
DEVICE bool eq_pair(word2 a, word2 b) { return a == b; }
DEVICE bool lt_i64(word2 a, word2 b) { return (long long)a < (long long)b; }
DEVICE bool lt_u64(word2 a, word2 b) { return a < b; }
DEVICE word2 min_i64(word2 a, word2 b) { return (long long)b < (long long)a ? b : a; }
DEVICE word2 max_i64(word2 a, word2 b) { return (long long)a < (long long)b ? b : a; }
DEVICE word2 min_u64(word2 a, word2 b) { return b < a ? b : a; }
DEVICE word2 max_u64(word2 a, word2 b) { return a < b ? b : a; }
DEVICE word2 abs_pair(word2 a) { return (long long)a < 0 ? 0 - a : a; }
DEVICE word2 sign_i64(word2 a) { return (word2)(long long)(((long long)a > 0) - ((long long)a < 0)); }
DEVICE word2 sign_u64(word2 a) { return a != 0; }
DEVICE word2 div_i64(word2 a, word2 b) {
    if (b == 0) { return 0; }
    return b == ~0ull ? 0 - a : (word2)((long long)a / (long long)b);
}
DEVICE word2 rem_i64(word2 a, word2 b) {
    return b == 0 || b == ~0ull ? 0 : (word2)((long long)a % (long long)b);
}
DEVICE word2 div_u64(word2 a, word2 b) { return b == 0 ? 0 : a / b; }
DEVICE word2 rem_u64(word2 a, word2 b) { return b == 0 ? 0 : a % b; }
DEVICE word2 pow_i64(word2 a, word2 b) {
    if (b >> 32 != 0) {
        if (a == 1 || (a == ~0ull && (b & 1) == 0)) { return 1; }
        return a == ~0ull ? a : 0;
    }
    word2 power = 1;
    while (b != 0) {
        if ((b & 1) != 0) { power = power * a; }
        a = a * a;
        b = b >> 1;
    }
    return power;
}
DEVICE unsigned random_bits(word2 key, word2 stream, word2 index) {
    return random_bits(make_uint2(low(key), high(key)), make_uint2(low(stream), high(stream)),
                       make_uint2(low(index), high(index)));
}

// 32-bit floats.
DEVICE float sqrt_f32(float x) { return sqrtf(x); }
DEVICE float floor_f32(float x) { return floorf(x); }
DEVICE float nearest_f32(float x) { return rintf(x); }
DEVICE float div_f32(float a, float b) { return a / b; }
DEVICE float rem_f32(float a, float b) { return fmodf(a, b); }
DEVICE float f32_of_i32(int a) { return (float)a; }
DEVICE float f32_of_u32(unsigned a) { return (float)a; }
DEVICE float f32_of_i64(word2 a) { return (float)(long long)a; }
DEVICE float f32_of_u64(word2 a) { return (float)a; }
DEVICE word2 i64_of_f32(float x) {
    if (x != x) { return 0; }
    if (x >= 9223372036854775808.0f) { return 0x7fffffffffffffffull; }
    return x <= -9223372036854775808.0f ? 0x8000000000000000ull : (word2)(long long)x;
}
DEVICE word2 u64_of_f32(float x) {
    if (!(x > 0.0f)) { return 0; }
    return x >= 18446744073709551616.0f ? ~0ull : (word2)x;
}

// 64-bit floats.
DEVICE double double_of(unsigned low, unsigned high) { return __longlong_as_double((long long)pair(low, high)); }
DEVICE unsigned low(double a) { return (unsigned)__double_as_longlong(a); }
DEVICE unsigned high(double a) { return (unsigned)(__double_as_longlong(a) >> 32); }
DEVICE bool is_nan_f64(double a) { return a != a; }
DEVICE bool is_not_zero_f64(double a) { return a != 0.0; }
DEVICE double neg_f64(double a) { return -a; }
DEVICE double abs_f64(double a) { return fabs(a); }
DEVICE double sign_f64(double a) { return a > 0.0 ? 1.0 : a < 0.0 ? -1.0 : a; }
DEVICE double floor_f64(double a) { return floor(a); }
DEVICE double nearest_f64(double a) { return rint(a); }
DEVICE double sqrt_f64(double a) { return sqrt(a); }
DEVICE double rsqrt_f64(double a) { return 1.0 / sqrt(a); }
DEVICE double exp_f64(double a) { return exp(a); }
DEVICE double log_f64(double a) { return log(a); }
DEVICE double sin_f64(double a) { return sin(a); }
DEVICE double cos_f64(double a) { return cos(a); }
DEVICE double atan_f64(double a) { return atan(a); }
DEVICE double erf_f64(double a) { return erf(a); }
DEVICE double tanh_f64(double a) { return tanh(a); }
DEVICE double sigmoid_f64(double a) {
    double e = exp(-fabs(a));
    return (a < 0.0 ? e : 1.0) / (1.0 + e);
}
DEVICE double add_f64(double a, double b) { return a + b; }
DEVICE double sub_f64(double a, double b) { return a - b; }
DEVICE double mul_f64(double a, double b) { return a * b; }
DEVICE double div_f64(double a, double b) { return a / b; }
DEVICE double rem_f64(double a, double b) { return fmod(a, b); }
DEVICE double pow_f64(double a, double b) { return pow(a, b); }
DEVICE double min_f64(double a, double b) { return a != a || a <= b ? a : b; }
DEVICE double max_f64(double a, double b) { return a != a || a >= b ? a : b; }
DEVICE bool eq_f64(double a, double b) { return a == b; }
DEVICE bool lt_f64(double a, double b) { return a < b; }
DEVICE bool le_f64(double a, double b) { return a <= b; }
DEVICE double f64_of_f32(float x) { return (double)x; }
DEVICE double f64_of_i32(int x) { return (double)x; }
DEVICE double f64_of_u32(unsigned x) { return (double)x; }
DEVICE double f64_of_i64(word2 x) { return (double)(long long)x; }
DEVICE double f64_of_u64(word2 x) { return (double)x; }
DEVICE float f32_of_f64(double x) { return (float)x; }
DEVICE int i32_of_f64(double x) {
    if (x != x) { return 0; }
    if (x >= 2147483648.0) { return 0x7fffffff; }
    return x <= -2147483649.0 ? (int)0x80000000u : (int)x;
}
DEVICE unsigned u32_of_f64(double x) {
    if (!(x > 0.0)) { return 0; }
    return x >= 4294967296.0 ? 0xffffffffu : (unsigned)x;
}
DEVICE word2 i64_of_f64(double x) {
    if (x != x) { return 0; }
    if (x >= 9223372036854775808.0) { return 0x7fffffffffffffffull; }
    return x <= -9223372036854775808.0 ? 0x8000000000000000ull : (word2)(long long)x;
}
DEVICE word2 u64_of_f64(double x) {
    if (!(x > 0.0)) { return 0; }
    return x >= 18446744073709551616.0 ? ~0ull : (word2)x;
}
