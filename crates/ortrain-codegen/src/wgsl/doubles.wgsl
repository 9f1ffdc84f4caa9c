// 64-bit floats: their bits as pairs of words, computed by integers, so that every driver rounds as IEEE 754 says.
fn size_f64(a: vec2<u32>) -> vec2<u32> { return vec2<u32>(a.x, a.y & 0x7fffffffu); }
fn sign_bit_f64(a: vec2<u32>) -> u32 { return a.y & 0x80000000u; }
fn is_zero_f64(a: vec2<u32>) -> bool { return is_zero_pair(size_f64(a)); }
fn is_not_zero_f64(a: vec2<u32>) -> bool { return !is_zero_f64(a); }
fn is_infinite_f64(a: vec2<u32>) -> bool { return eq_pair(size_f64(a), vec2<u32>(0u, 0x7ff00000u)); }
fn is_nan_f64(a: vec2<u32>) -> bool { return lt_u64(vec2<u32>(0u, 0x7ff00000u), size_f64(a)); }
fn nan_f64() -> vec2<u32> { return vec2<u32>(0u, 0x7ff80000u); }
fn infinity_f64(sign: u32) -> vec2<u32> { return vec2<u32>(0u, sign | 0x7ff00000u); }
fn leading_zeros_pair(a: vec2<u32>) -> u32 {
    return select(countLeadingZeros(a.y), 32u + countLeadingZeros(a.x), a.y == 0u);
}
fn shift_right_sticky(a: vec2<u32>, by: u32) -> vec2<u32> {
    // The last bit says whether a bit that is set was shifted out.
    let kept = shift_right_pair(a, by);
    let lost = !eq_pair(shift_left_pair(kept, by), a);
    return vec2<u32>(kept.x | select(0u, 1u, lost), kept.y);
}
fn exponent_bits_f64(a: vec2<u32>) -> i32 { return bitcast<i32>((a.y >> 20u) & 0x7ffu); }
fn exponent_f64(a: vec2<u32>) -> i32 {
    // A finite number that is not zero is digits_f64 times 2^(exponent - 1075).
    let bits = exponent_bits_f64(a);
    if (bits != 0) { return bits; }
    return 12 - bitcast<i32>(leading_zeros_pair(size_f64(a)));
}
fn digits_f64(a: vec2<u32>) -> vec2<u32> {
    // The first digit at bit 52, also of subnormal numbers.
    if (exponent_bits_f64(a) != 0) { return vec2<u32>(a.x, (a.y & 0xfffffu) | 0x100000u); }
    let size = size_f64(a);
    return shift_left_pair(size, leading_zeros_pair(size) - 11u);
}
fn raw_digits_f64(a: vec2<u32>) -> vec2<u32> {
    // As they stand: those of subnormal numbers have the exponent 1.
    return vec2<u32>(a.x, (a.y & 0xfffffu) | select(0u, 0x100000u, exponent_bits_f64(a) != 0));
}
fn round_f64(sign: u32, exponent: i32, digits: vec2<u32>) -> vec2<u32> {
    // digits times 2^(exponent - 1084), to the nearest, to the even one between two. The first digit is at bit 62.
    if (exponent >= 0x7fe) { return infinity_f64(sign); }
    var rest = digits;
    if (exponent < 0) { rest = shift_right_sticky(digits, bitcast<u32>(-exponent)); }
    var result = shift_right_pair(rest, 10u);
    let cut = rest.x & 0x3ffu;
    if (cut > 0x200u || (cut == 0x200u && (result.x & 1u) != 0u)) { result = add_pair(result, vec2<u32>(1u, 0u)); }
    // The first digit, or a carry beyond it, adds one to the exponent.
    return vec2<u32>(result.x, (result.y + (bitcast<u32>(max(exponent, 0)) << 20u)) | sign);
}
fn normalize_f64(sign: u32, exponent: i32, digits: vec2<u32>) -> vec2<u32> {
    // The same for digits that start anywhere.
    if (is_zero_pair(digits)) { return vec2<u32>(0u, sign); }
    let zeros = leading_zeros_pair(digits);
    if (zeros == 0u) { return round_f64(sign, exponent + 1, shift_right_sticky(digits, 1u)); }
    return round_f64(sign, exponent + 1 - bitcast<i32>(zeros), shift_left_pair(digits, zeros - 1u));
}
fn neg_f64(a: vec2<u32>) -> vec2<u32> { return vec2<u32>(a.x, a.y ^ 0x80000000u); }
fn abs_f64(a: vec2<u32>) -> vec2<u32> { return size_f64(a); }
fn sign_f64(a: vec2<u32>) -> vec2<u32> {
    if (is_zero_f64(a) || is_nan_f64(a)) { return a; }
    return vec2<u32>(0u, sign_bit_f64(a) | 0x3ff00000u);
}
fn floor_f64(a: vec2<u32>) -> vec2<u32> {
    let bits = exponent_bits_f64(a);
    if (bits >= 1075 || is_zero_f64(a)) { return a; }
    let negative = sign_bit_f64(a) != 0u;
    if (bits < 1023) { return vec2<u32>(0u, select(0u, 0xbff00000u, negative)); }
    let behind = sub_pair(shift_left_pair(vec2<u32>(1u, 0u), bitcast<u32>(1075 - bits)), vec2<u32>(1u, 0u));
    let cut = a & ~behind;
    if (!negative || eq_pair(cut, a)) { return cut; }
    return add_pair(cut, add_pair(behind, vec2<u32>(1u, 0u)));
}
fn eq_f64(a: vec2<u32>, b: vec2<u32>) -> bool {
    return !is_nan_f64(a) && (eq_pair(a, b) || (is_zero_f64(a) && is_zero_f64(b)));
}
fn place_f64(a: vec2<u32>) -> vec2<u32> {
    // Numbers stand in this order, -0 before 0.
    return select(vec2<u32>(a.x, a.y | 0x80000000u), ~a, is_negative_pair(a));
}
fn lt_f64(a: vec2<u32>, b: vec2<u32>) -> bool {
    if (is_nan_f64(a) || is_nan_f64(b) || (is_zero_f64(a) && is_zero_f64(b))) { return false; }
    return lt_u64(place_f64(a), place_f64(b));
}
fn le_f64(a: vec2<u32>, b: vec2<u32>) -> bool { return lt_f64(a, b) || eq_f64(a, b); }
fn min_f64(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> {
    if (is_nan_f64(a) || is_nan_f64(b)) { return nan_f64(); }
    return select(b, a, le_f64(a, b));
}
fn max_f64(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> {
    if (is_nan_f64(a) || is_nan_f64(b)) { return nan_f64(); }
    return select(b, a, le_f64(b, a));
}
fn add_f64(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> {
    if (is_nan_f64(a) || is_nan_f64(b)) { return nan_f64(); }
    let differ = sign_bit_f64(a) != sign_bit_f64(b);
    if (is_infinite_f64(a)) { return select(a, nan_f64(), differ && is_infinite_f64(b)); }
    if (is_infinite_f64(b)) { return b; }
    let swapped = lt_u64(size_f64(a), size_f64(b));
    let large = select(a, b, swapped);
    let small = select(b, a, swapped);
    let exponent = max(exponent_bits_f64(large), 1);
    let apart = bitcast<u32>(exponent - max(exponent_bits_f64(small), 1));
    let digits = shift_left_pair(raw_digits_f64(large), 9u);
    let others = shift_right_sticky(shift_left_pair(raw_digits_f64(small), 9u), apart);
    if (!differ) { return normalize_f64(sign_bit_f64(large), exponent, add_pair(digits, others)); }
    let rest = sub_pair(digits, others);
    return normalize_f64(select(sign_bit_f64(large), 0u, is_zero_pair(rest)), exponent, rest);
}
fn sub_f64(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> { return add_f64(a, neg_f64(b)); }
fn mul_high_sticky(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> {
    // The upper pair of the product; the last bit says whether the lower pair is not zero.
    let lowest = mul_words(a.x, b.x);
    let middle = add_pair(mul_words(a.x, b.y), vec2<u32>(lowest.y, 0u));
    let other = add_pair(mul_words(a.y, b.x), vec2<u32>(middle.x, 0u));
    let upper = add_pair(add_pair(mul_words(a.y, b.y), vec2<u32>(middle.y, 0u)), vec2<u32>(other.y, 0u));
    return vec2<u32>(upper.x | select(0u, 1u, (lowest.x | other.x) != 0u), upper.y);
}
fn mul_f64(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> {
    if (is_nan_f64(a) || is_nan_f64(b)) { return nan_f64(); }
    let sign = sign_bit_f64(a) ^ sign_bit_f64(b);
    let zero = is_zero_f64(a) || is_zero_f64(b);
    if (is_infinite_f64(a) || is_infinite_f64(b)) { return select(infinity_f64(sign), nan_f64(), zero); }
    if (zero) { return vec2<u32>(0u, sign); }
    let product = mul_high_sticky(shift_left_pair(digits_f64(a), 10u), shift_left_pair(digits_f64(b), 11u));
    return normalize_f64(sign, exponent_f64(a) + exponent_f64(b) - 1023, product);
}
fn div_f64(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> {
    if (is_nan_f64(a) || is_nan_f64(b)) { return nan_f64(); }
    let sign = sign_bit_f64(a) ^ sign_bit_f64(b);
    if (is_infinite_f64(a)) { return select(infinity_f64(sign), nan_f64(), is_infinite_f64(b)); }
    if (is_zero_f64(b)) { return select(infinity_f64(sign), nan_f64(), is_zero_f64(a)); }
    if (is_zero_f64(a) || is_infinite_f64(b)) { return vec2<u32>(0u, sign); }
    // Digit by digit: 56 of them, of which the first or the second is set, and whether something is left.
    let divisor = digits_f64(b);
    var rest = digits_f64(a);
    var quotient = vec2<u32>(0u, 0u);
    for (var k: i32 = 0; k < 56; k++) {
        quotient = shift_left_pair(quotient, 1u);
        if (!lt_u64(rest, divisor)) {
            rest = sub_pair(rest, divisor);
            quotient.x |= 1u;
        }
        rest = shift_left_pair(rest, 1u);
    }
    quotient = shift_left_pair(quotient, 7u);
    quotient.x |= select(1u, 0u, is_zero_pair(rest));
    return normalize_f64(sign, exponent_f64(a) - exponent_f64(b) + 1022, quotient);
}
fn sqrt_f64(a: vec2<u32>) -> vec2<u32> {
    if (is_zero_f64(a)) { return a; }
    if (is_nan_f64(a) || sign_bit_f64(a) != 0u) { return nan_f64(); }
    if (is_infinite_f64(a)) { return a; }
    // Digit by digit: 55 of them, and whether something is left. The exponent is made even.
    let odd = (exponent_f64(a) & 1) == 0;
    var digits = shift_left_pair(digits_f64(a), select(10u, 11u, odd));
    var rest = vec2<u32>(0u, 0u);
    var root = vec2<u32>(0u, 0u);
    for (var k: i32 = 0; k < 55; k++) {
        rest = shift_left_pair(rest, 2u);
        rest.x |= digits.y >> 30u;
        digits = shift_left_pair(digits, 2u);
        let next = shift_left_pair(root, 2u) | vec2<u32>(1u, 0u);
        root = shift_left_pair(root, 1u);
        if (!lt_u64(rest, next)) {
            rest = sub_pair(rest, next);
            root.x |= 1u;
        }
    }
    root = shift_left_pair(root, 8u);
    root.x |= select(1u, 0u, is_zero_pair(rest));
    return round_f64(0u, 1048 + ((exponent_f64(a) - select(1075, 1076, odd)) >> 1u), root);
}
fn rsqrt_f64(a: vec2<u32>) -> vec2<u32> { return div_f64(vec2<u32>(0u, 0x3ff00000u), sqrt_f64(a)); }
fn f64_of_u64(a: vec2<u32>) -> vec2<u32> { return normalize_f64(0u, 1084, a); }
fn f64_of_i64(a: vec2<u32>) -> vec2<u32> { return normalize_f64(a.y & 0x80000000u, 1084, abs_pair(a)); }
fn f64_of_f32(x: f32) -> vec2<u32> {
    let bits = bitcast<u32>(x);
    let sign = bits & 0x80000000u;
    let exponent = (bits >> 23u) & 0xffu;
    let digits = bits & 0x7fffffu;
    if (exponent == 0xffu) { return select(infinity_f64(sign), nan_f64(), digits != 0u); }
    let first = select(0u, 0x800000u, exponent != 0u);
    return normalize_f64(sign, bitcast<i32>(max(exponent, 1u)) + 934, vec2<u32>(digits | first, 0u));
}
fn f32_of_f64(a: vec2<u32>) -> f32 {
    let sign = sign_bit_f64(a);
    if (is_nan_f64(a)) { return bitcast<f32>(sign | 0x7fc00000u); }
    let exponent = exponent_bits_f64(a) - 897;
    if (exponent >= 254) { return bitcast<f32>(sign | 0x7f800000u); }
    // The first digit at bit 30; the last bit says whether there are digits behind.
    var digits = shift_right_sticky(raw_digits_f64(a), 22u).x;
    if (exponent < 0) { digits = shift_right_sticky(vec2<u32>(digits, 0u), bitcast<u32>(-exponent)).x; }
    let cut = digits & 0x7fu;
    var result = digits >> 7u;
    if (cut > 0x40u || (cut == 0x40u && (result & 1u) != 0u)) { result += 1u; }
    return bitcast<f32>(sign | (result + (bitcast<u32>(max(exponent, 0)) << 23u)));
}
fn whole_f64(a: vec2<u32>) -> vec2<u32> {
    // The digits before the point of a number below 2^64, without its sign.
    let exponent = exponent_bits_f64(a) - 1075;
    if (exponent >= 0) { return shift_left_pair(raw_digits_f64(a), bitcast<u32>(exponent)); }
    return shift_right_pair(raw_digits_f64(a), bitcast<u32>(-exponent));
}
fn i64_of_f64(a: vec2<u32>) -> vec2<u32> {
    if (is_nan_f64(a)) { return vec2<u32>(0u, 0u); }
    let negative = sign_bit_f64(a) != 0u;
    if (exponent_bits_f64(a) >= 1086) {
        return select(vec2<u32>(0xffffffffu, 0x7fffffffu), vec2<u32>(0u, 0x80000000u), negative);
    }
    let whole = whole_f64(a);
    return select(whole, neg_pair(whole), negative);
}
fn u64_of_f64(a: vec2<u32>) -> vec2<u32> {
    if (is_nan_f64(a) || sign_bit_f64(a) != 0u) { return vec2<u32>(0u, 0u); }
    if (exponent_bits_f64(a) >= 1087) { return vec2<u32>(0xffffffffu, 0xffffffffu); }
    return whole_f64(a);
}
fn i32_of_f64(a: vec2<u32>) -> i32 {
    if (is_nan_f64(a)) { return 0; }
    let negative = sign_bit_f64(a) != 0u;
    if (exponent_bits_f64(a) >= 1054) { return bitcast<i32>(select(0x7fffffffu, 0x80000000u, negative)); }
    let whole = bitcast<i32>(whole_f64(a).x);
    return select(whole, -whole, negative);
}
fn u32_of_f64(a: vec2<u32>) -> u32 {
    if (is_nan_f64(a) || sign_bit_f64(a) != 0u) { return 0u; }
    if (exponent_bits_f64(a) >= 1055) { return 0xffffffffu; }
    return whole_f64(a).x;
}
