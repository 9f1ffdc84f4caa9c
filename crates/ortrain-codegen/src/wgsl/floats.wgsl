// Floats: conversions bit by bit, and what drivers compute in another way than IEEE 754 says.
fn float_of(bits: u32) -> f32 { return bitcast<f32>(bits); }
fn bits_of(x: f32) -> u32 { return bitcast<u32>(x); }
fn is_nan(x: f32) -> bool { return (bitcast<u32>(x) & 0x7fffffffu) > 0x7f800000u; }
fn is_not_zero(x: f32) -> bool { return (bitcast<u32>(x) & 0x7fffffffu) != 0u; }
fn with_sign(x: f32, sign: f32) -> f32 {
    return bitcast<f32>((bitcast<u32>(x) & 0x7fffffffu) | (bitcast<u32>(sign) & 0x80000000u));
}
fn neg_f32(x: f32) -> f32 { return bitcast<f32>(bitcast<u32>(x) ^ 0x80000000u); }
fn abs_f32(x: f32) -> f32 { return bitcast<f32>(bitcast<u32>(x) & 0x7fffffffu); }
fn sign_f32(x: f32) -> f32 {
    if (!is_not_zero(x) || is_nan(x)) { return x; }
    return with_sign(1.0, x);
}
fn floor_f32(x: f32) -> f32 {
    if (abs_f32(x) < 8388608.0) { return with_sign(floor(x), x); }
    return x;
}
fn nearest_f32(x: f32) -> f32 {
    if (abs_f32(x) < 8388608.0) { return with_sign(round(x), x); }
    return x;
}
fn min_f32(a: f32, b: f32) -> f32 {
    if (is_nan(a)) { return a; }
    if (is_nan(b)) { return b; }
    return select(b, a, a <= b);
}
fn max_f32(a: f32, b: f32) -> f32 {
    if (is_nan(a)) { return a; }
    if (is_nan(b)) { return b; }
    return select(b, a, a >= b);
}
fn sqrt_f32(x: f32) -> f32 {
    if (!is_not_zero(x)) { return x; }
    if (is_nan(x) || x < 0.0) { return float_of(0x7fc00000u); }
    return sqrt(x);
}
fn rsqrt_f32(x: f32) -> f32 {
    if (!is_not_zero(x)) { return with_sign(float_of(0x7f800000u), x); }
    return 1.0 / sqrt_f32(x);
}
fn div_f32(a: f32, b: f32) -> f32 {
    let ab = bitcast<u32>(a) & 0x7fffffffu;
    let bb = bitcast<u32>(b) & 0x7fffffffu;
    if (ab > 0x7f800000u || bb > 0x7f800000u) { return float_of(0x7fc00000u); }
    // A driver that knows one of the operands may say that a quotient of zeros is zero.
    let sign = (bitcast<u32>(a) ^ bitcast<u32>(b)) & 0x80000000u;
    if (ab == bb && (ab == 0u || ab == 0x7f800000u)) { return float_of(0x7fc00000u); }
    if (bb == 0u || ab == 0x7f800000u) { return float_of(sign | 0x7f800000u); }
    if (ab == 0u || bb == 0x7f800000u) { return float_of(sign); }
    // Reciprocals of numbers near the ends of the range would leave it.
    if (bb > 0x7e000000u) { return (a * 0.0625) / (b * 0.0625); }
    if (bb < 0x01000000u) { return (a * 16777216.0) / (b * 16777216.0); }
    return a / b;
}
fn rem_f32(a: f32, b: f32) -> f32 {
    let ab = bitcast<u32>(a) & 0x7fffffffu;
    let bb = bitcast<u32>(b) & 0x7fffffffu;
    if (ab >= 0x7f800000u || bb > 0x7f800000u || bb == 0u) { return float_of(0x7fc00000u); }
    if (ab < bb) { return a; }
    // Exact: mantissas are subtracted from the largest power down.
    var ea = i32(max(ab >> 23u, 1u));
    let eb = i32(max(bb >> 23u, 1u));
    var ma = (ab & 0x7fffffu) | select(0u, 0x800000u, (ab >> 23u) != 0u);
    let mb = (bb & 0x7fffffu) | select(0u, 0x800000u, (bb >> 23u) != 0u);
    while (ea > eb) {
        if (ma >= mb) { ma -= mb; }
        ma = ma << 1u;
        ea -= 1;
    }
    if (ma >= mb) { ma -= mb; }
    if (ma == 0u) { return with_sign(0.0, a); }
    while (ma < 0x800000u && ea > 1) {
        ma = ma << 1u;
        ea -= 1;
    }
    let result = select(ma, (u32(ea) << 23u) | (ma & 0x7fffffu), ma >= 0x800000u);
    return with_sign(bitcast<f32>(result), a);
}
fn i32_of_f32(x: f32) -> i32 {
    if (is_nan(x)) { return 0; }
    if (x >= 2147483648.0) { return 2147483647; }
    if (x <= -2147483648.0) { return int_of(0x80000000u); }
    return i32(x);
}
fn u32_of_f32(x: f32) -> u32 {
    if (is_nan(x) || x <= 0.0) { return 0u; }
    if (x >= 4294967296.0) { return 0xffffffffu; }
    return u32(x);
}
fn magnitude_of_f32(x: f32) -> vec2<u32> {
    // The integer part of a number below 2^64.
    let bits = bitcast<u32>(x) & 0x7fffffffu;
    let exponent = i32(bits >> 23u) - 150;
    let mantissa = vec2<u32>((bits & 0x7fffffu) | 0x800000u, 0u);
    if (exponent >= 0) { return shift_left_pair(mantissa, u32(exponent)); }
    return shift_right_pair(mantissa, u32(-exponent));
}
fn i64_of_f32(x: f32) -> vec2<u32> {
    if (is_nan(x)) { return vec2<u32>(0u, 0u); }
    if (x >= 9223372036854775808.0) { return vec2<u32>(0xffffffffu, 0x7fffffffu); }
    if (x <= -9223372036854775808.0) { return vec2<u32>(0u, 0x80000000u); }
    let magnitude = magnitude_of_f32(x);
    return select(magnitude, neg_pair(magnitude), x < 0.0);
}
fn u64_of_f32(x: f32) -> vec2<u32> {
    if (is_nan(x) || x <= 0.0) { return vec2<u32>(0u, 0u); }
    if (x >= 18446744073709551616.0) { return vec2<u32>(0xffffffffu, 0xffffffffu); }
    return magnitude_of_f32(x);
}
fn f32_of_u32(a: u32) -> f32 {
    // Rounded to the nearest, to the even one between two.
    if (a < 0x1000000u) { return f32(a); }
    let top = 31u - countLeadingZeros(a);
    let shift = top - 23u;
    let rest = a & ((1u << shift) - 1u);
    let half = 1u << (shift - 1u);
    var mantissa = a >> shift;
    if (rest > half || (rest == half && (mantissa & 1u) != 0u)) { mantissa += 1u; }
    return bitcast<f32>(((top + 127u) << 23u) + (mantissa - 0x800000u));
}
fn f32_of_i32(a: i32) -> f32 {
    let magnitude = f32_of_u32(bitcast<u32>(abs_i32(a)));
    return select(magnitude, -magnitude, a < 0);
}
fn f32_of_u64(a: vec2<u32>) -> f32 {
    if (a.y == 0u) { return f32_of_u32(a.x); }
    // All but the highest 32 bits are one bit, which says whether there are some.
    let shift = 32u - countLeadingZeros(a.y);
    let rest = shift_left_pair(shift_right_pair(a, shift), shift);
    let sticky = select(1u, 0u, eq_pair(rest, a));
    return f32_of_u32(shift_right_pair(a, shift).x | sticky) * bitcast<f32>((shift + 127u) << 23u);
}
fn f32_of_i64(a: vec2<u32>) -> f32 {
    let magnitude = f32_of_u64(abs_pair(a));
    return select(magnitude, -magnitude, is_negative_pair(a));
}
fn f32_of_f16(bits: u32) -> f32 {
    let sign = (bits & 0x8000u) << 16u;
    let exponent = (bits >> 10u) & 31u;
    let digits = bits & 1023u;
    if (exponent == 31u) { return bitcast<f32>(sign | 0x7f800000u | (digits << 13u)); }
    if (exponent > 0u) { return bitcast<f32>(sign | ((exponent + 112u) << 23u) | (digits << 13u)); }
    return with_sign(f32(digits) * 5.9604644775390625e-8, bitcast<f32>(sign));
}
fn f16_of_f32(x: f32) -> u32 {
    let bits = bitcast<u32>(x);
    let sign = (bits >> 16u) & 0x8000u;
    let size = bits & 0x7fffffffu;
    if (size > 0x7f800000u) { return sign | 0x7e00u; }
    if (size >= 0x477ff000u) { return sign | 0x7c00u; }
    if (size < 0x33000000u) { return sign; }
    var shift = 13u;
    var mantissa = (size & 0x7fffffu) | 0x800000u;
    var base = 0u;
    if (size < 0x38800000u) { shift = 126u - (size >> 23u); } else { base = ((size >> 23u) - 113u) << 10u; }
    let rest = mantissa & ((1u << shift) - 1u);
    let half = 1u << (shift - 1u);
    mantissa = mantissa >> shift;
    if (rest > half || (rest == half && (mantissa & 1u) != 0u)) { mantissa += 1u; }
    return sign | (base + mantissa);
}
fn f32_of_bf16(bits: u32) -> f32 { return bitcast<f32>(bits << 16u); }
fn bf16_of_f32(x: f32) -> u32 {
    let bits = bitcast<u32>(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) { return (bits >> 16u) | 0x40u; }
    return (bits + 0x7fffu + ((bits >> 16u) & 1u)) >> 16u;
}
fn to_f16(x: f32) -> f32 { return f32_of_f16(f16_of_f32(x)); }
fn to_bf16(x: f32) -> f32 { return f32_of_bf16(bf16_of_f32(x)); }
fn first_term(x: f32) -> f32 {
    let nearest = to_bf16(x);
    if ((bitcast<u32>(nearest) & 0x7fffffffu) == 0x7f800000u && (bitcast<u32>(x) & 0x7fffffffu) < 0x7f800000u) {
        return bitcast<f32>(bitcast<u32>(x) & 0xffff0000u);
    }
    return nearest;
}
fn terms_of(x: f32) -> vec3<f32> {
    let first = first_term(x);
    if ((bitcast<u32>(x) & 0x7fffffffu) >= 0x7f800000u) { return vec3<f32>(first, 0.0, 0.0); }
    let rest = x - first;
    let second = to_bf16(rest);
    return vec3<f32>(first, second, to_bf16(rest - second));
}
fn second_term(x: f32) -> f32 { return terms_of(x).y; }
fn third_term(x: f32) -> f32 { return terms_of(x).z; }
