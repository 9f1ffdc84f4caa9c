#pragma nv_diag_suppress 177, 550
#define DEVICE __device__ __forceinline__
DEVICE float as_f32(unsigned x) { return __uint_as_float(x); }
DEVICE float as_f32(int x) { return __int_as_float(x); }
DEVICE unsigned as_u32(float x) { return __float_as_uint(x); }
DEVICE unsigned as_u32(int x) { return (unsigned)x; }
DEVICE unsigned as_u32(unsigned x) { return x; }
DEVICE int as_i32(float x) { return __float_as_int(x); }
DEVICE int as_i32(unsigned x) { return (int)x; }
DEVICE unsigned count_leading_zeros(unsigned x) { return (unsigned)__clz((int)x); }
template <class T> DEVICE T select(T no, T yes, bool condition) { return condition ? yes : no; }
template <class T> DEVICE T clamp(T x, T least, T most) { return x < least ? least : (x > most ? most : x); }
DEVICE uint2 select(uint2 no, uint2 yes, bool c) { return make_uint2(c ? yes.x : no.x, c ? yes.y : no.y); }
DEVICE uint2 xy(uint4 a) { return make_uint2(a.x, a.y); }
DEVICE uint2 zw(uint4 a) { return make_uint2(a.z, a.w); }
DEVICE uint2 operator&(uint2 a, uint2 b) { return make_uint2(a.x & b.x, a.y & b.y); }
DEVICE uint2 operator|(uint2 a, uint2 b) { return make_uint2(a.x | b.x, a.y | b.y); }
DEVICE uint2 operator^(uint2 a, uint2 b) { return make_uint2(a.x ^ b.x, a.y ^ b.y); }
DEVICE float2 operator+(float2 a, float2 b) { return make_float2(a.x + b.x, a.y + b.y); }
DEVICE float2 operator*(float a, float2 b) { return make_float2(a * b.x, a * b.y); }
DEVICE float4 operator+(float4 a, float4 b) { return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w); }
DEVICE float4 operator*(float a, float4 b) { return make_float4(a * b.x, a * b.y, a * b.z, a * b.w); }
DEVICE uint4 make_uint4(uint2 a, uint2 b) { return make_uint4(a.x, a.y, b.x, b.y); }
typedef unsigned long long word2;
