// CUDA C for the C++ compiler: kernels become functions, lanes call them one by one. It includes nothing, so that many
// small programs compile fast.
#pragma once
#define __device__
#define __forceinline__ static inline __attribute__((unused))
#define __global__
#define __shared__ static
#define __launch_bounds__(...)
#define __restrict__ __restrict

struct uint2 { unsigned x, y; };
struct uint3 { unsigned x, y, z; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct float3 { float x, y, z; };
struct alignas(16) float4 { float x, y, z, w; };
__forceinline__ uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
__forceinline__ uint3 make_uint3(unsigned x, unsigned y, unsigned z) { return {x, y, z}; }
__forceinline__ uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
__forceinline__ float2 make_float2(float x, float y) { return {x, y}; }
__forceinline__ float3 make_float3(float x, float y, float z) { return {x, y, z}; }
__forceinline__ float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

template <class To, class From> __forceinline__ To bits_as(From from) { return __builtin_bit_cast(To, from); }
__forceinline__ float __uint_as_float(unsigned x) { return bits_as<float>(x); }
__forceinline__ float __int_as_float(int x) { return bits_as<float>(x); }
__forceinline__ unsigned __float_as_uint(float x) { return bits_as<unsigned>(x); }
__forceinline__ int __float_as_int(float x) { return bits_as<int>(x); }
__forceinline__ double __longlong_as_double(long long x) { return bits_as<double>(x); }
__forceinline__ long long __double_as_longlong(double x) { return bits_as<long long>(x); }
__forceinline__ int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
template <class T> __forceinline__ T min(T a, T b) { return b < a ? b : a; }
template <class T> __forceinline__ T max(T a, T b) { return a < b ? b : a; }

extern "C" {
float floorf(float), rintf(float), sqrtf(float), fmodf(float, float);
double floor(double), rint(double), fabs(double), sqrt(double), exp(double), log(double), sin(double), cos(double), atan(double);
double erf(double), tanh(double), fmod(double, double), pow(double, double);

struct SoftwareIndex { unsigned x, y, z; };
extern SoftwareIndex blockIdx, threadIdx;
void software_barrier();
}
#define __syncthreads() software_barrier()
__forceinline__ unsigned atomicAnd(unsigned* at, unsigned value) { unsigned old = *at; *at = old & value; return old; }
__forceinline__ unsigned atomicOr(unsigned* at, unsigned value) { unsigned old = *at; *at = old | value; return old; }
__forceinline__ unsigned atomicMin(unsigned* at, unsigned value) {
    unsigned old = *at;
    *at = old < value ? old : value;
    return old;
}

// What a module exports for each kernel: a function that takes its arguments as an array, their number, and whether
// its lanes wait for each other.
template <unsigned... K> struct SoftwareIndices {};
template <class... Arguments, unsigned... K>
static inline void software_call(void (*kernel)(Arguments...), void* const* arguments, SoftwareIndices<K...>) {
    kernel((Arguments)arguments[K]...);
}
template <class... Arguments> static inline void software_call(void (*kernel)(Arguments...), void* const* arguments) {
    software_call(kernel, arguments, SoftwareIndices<__integer_pack(sizeof...(Arguments))...>());
}
template <class... Arguments> constexpr unsigned software_count(void (*)(Arguments...)) { return sizeof...(Arguments); }
#define SOFTWARE_KERNEL(name, waits)                                                             \
    extern "C" {                                                                                 \
    void run_##name(void* const* arguments) { software_call(name, arguments); }                  \
    extern const unsigned waits_##name = waits, arguments_##name = software_count(name);         \
    }
