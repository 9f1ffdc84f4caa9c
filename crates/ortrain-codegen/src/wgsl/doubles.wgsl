// 64-bit floats: their bits as pairs of words, computed by integers, so that every driver rounds as IEEE 754 says.
//
// Functions have one path, and special numbers are chosen at its end: drivers put a copy of a function at each of its calls, and
// take long for copies with many branches.
fn size_f64(a: vec2<u32>) -> vec2<u32> { return vec2<u32>(a.x, a.y & 0x7fffffffu); }
fn sign_bit_f64(a: vec2<u32>) -> u32 { return a.y & 0x80000000u; }
fn is_zero_f64(a: vec2<u32>) -> bool { return (a.x | (a.y & 0x7fffffffu)) == 0u; }
fn is_not_zero_f64(a: vec2<u32>) -> bool { return !is_zero_f64(a); }
fn is_infinite_f64(a: vec2<u32>) -> bool { return a.x == 0u && (a.y & 0x7fffffffu) == 0x7ff00000u; }
fn is_nan_f64(a: vec2<u32>) -> bool { return ((a.y & 0x7fffffffu) | select(1u, 0u, a.x == 0u)) > 0x7ff00000u; }
fn nan_f64() -> vec2<u32> { return vec2<u32>(0u, 0x7ff80000u); }
fn infinity_f64(sign: u32) -> vec2<u32> { return vec2<u32>(0u, sign | 0x7ff00000u); }
fn double_pair(a: vec2<u32>) -> vec2<u32> { return vec2<u32>(a.x << 1u, (a.y << 1u) | (a.x >> 31u)); }
fn leading_zeros_pair(a: vec2<u32>) -> u32 {
    return select(countLeadingZeros(a.y), 32u + countLeadingZeros(a.x), a.y == 0u);
}
fn shift_right_sticky(a: vec2<u32>, by: u32) -> vec2<u32> {
    // Of a pair below 2^63. The last bit says whether a bit that is set was shifted out.
    let kept = shift_right_pair(a, min(by, 63u));
    return vec2<u32>(kept.x | select(1u, 0u, eq_pair(shift_left_pair(kept, min(by, 63u)), a)), kept.y);
}
fn exponent_bits_f64(a: vec2<u32>) -> i32 { return bitcast<i32>((a.y >> 20u) & 0x7ffu); }
fn digits_f64(a: vec2<u32>) -> vec2<u32> {
    // As they stand, the first digit at bit 52. Those of a subnormal number start lower, and have the exponent 1.
    return vec2<u32>(a.x, (a.y & 0xfffffu) | select(0u, 0x100000u, exponent_bits_f64(a) != 0));
}
fn parts_f64(a: vec2<u32>) -> vec3<u32> {
    // The first digit at bit 52 also of a subnormal number; then the exponent. The number is digits times 2^(exponent - 1075).
    let digits = digits_f64(a);
    let by = leading_zeros_pair(digits) - 11u;
    let moved = shift_left_pair(digits, by);
    return vec3<u32>(moved.x, moved.y, bitcast<u32>(max(exponent_bits_f64(a), 1)) - by);
}
fn round_f64(sign: u32, exponent: i32, digits: vec2<u32>) -> vec2<u32> {
    // digits times 2^(exponent - 1084), to the nearest, to the even one between two. The first digit is at bit 62.
    let rest = shift_right_sticky(digits, bitcast<u32>(max(-exponent, 0)));
    // Half of the last place, and a little less where that is even.
    let moved = add_pair(rest, vec2<u32>(0x1ffu + ((rest.x >> 10u) & 1u), 0u));
    // The first digit, or a carry beyond it, adds one to the exponent.
    let high = (moved.y >> 10u) + (bitcast<u32>(max(exponent, 0)) << 20u);
    let result = vec2<u32>((moved.x >> 10u) | (moved.y << 22u), high | sign);
    return select(result, infinity_f64(sign), exponent >= 0x7fe);
}
fn normalize_f64(sign: u32, exponent: i32, digits: vec2<u32>) -> vec2<u32> {
    // The same for digits that start lower. There may be none.
    let by = leading_zeros_pair(digits) - 1u;
    let result = round_f64(sign, exponent - bitcast<i32>(by), shift_left_pair(digits, by));
    return select(result, vec2<u32>(0u, sign), is_zero_pair(digits));
}
fn neg_f64(a: vec2<u32>) -> vec2<u32> { return vec2<u32>(a.x, a.y ^ 0x80000000u); }
fn abs_f64(a: vec2<u32>) -> vec2<u32> { return size_f64(a); }
fn sign_f64(a: vec2<u32>) -> vec2<u32> {
    return select(vec2<u32>(0u, sign_bit_f64(a) | 0x3ff00000u), a, is_zero_f64(a) || is_nan_f64(a));
}
fn floor_f64(a: vec2<u32>) -> vec2<u32> {
    let bits = exponent_bits_f64(a);
    let negative = sign_bit_f64(a) != 0u;
    // The bits behind the point, of numbers from one up that have some.
    let one = shift_left_pair(vec2<u32>(1u, 0u), bitcast<u32>(clamp(1075 - bits, 0, 52)));
    let cut = a & ~sub_pair(one, vec2<u32>(1u, 0u));
    let whole = select(cut, add_pair(cut, one), negative && !eq_pair(cut, a));
    let small = vec2<u32>(0u, select(0u, 0xbff00000u, negative));
    return select(select(whole, small, bits < 1023), a, is_zero_f64(a));
}
fn nearest_f64(a: vec2<u32>) -> vec2<u32> {
    // The sum with 2^52 has no digits behind the point.
    let large = vec2<u32>(0u, 0x43300000u);
    let rounded = sub_f64(add_f64(size_f64(a), large), large);
    let signed = vec2<u32>(rounded.x, rounded.y | sign_bit_f64(a));
    return select(signed, a, exponent_bits_f64(a) >= 1075);
}
fn place_f64(a: vec2<u32>) -> vec2<u32> {
    // A signed integer: in the order of the numbers, the same for both zeros.
    return select(size_f64(a), neg_pair(size_f64(a)), is_negative_pair(a));
}
fn has_nan_f64(a: vec2<u32>, b: vec2<u32>) -> bool { return is_nan_f64(a) || is_nan_f64(b); }
fn eq_f64(a: vec2<u32>, b: vec2<u32>) -> bool { return !has_nan_f64(a, b) && eq_pair(place_f64(a), place_f64(b)); }
fn lt_f64(a: vec2<u32>, b: vec2<u32>) -> bool { return !has_nan_f64(a, b) && lt_i64(place_f64(a), place_f64(b)); }
fn le_f64(a: vec2<u32>, b: vec2<u32>) -> bool { return !has_nan_f64(a, b) && !lt_i64(place_f64(b), place_f64(a)); }
fn min_f64(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> {
    return select(select(a, b, lt_i64(place_f64(b), place_f64(a))), nan_f64(), has_nan_f64(a, b));
}
fn max_f64(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> {
    return select(select(a, b, lt_i64(place_f64(a), place_f64(b))), nan_f64(), has_nan_f64(a, b));
}
fn add_f64(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> {
    let swapped = lt_u64(size_f64(a), size_f64(b));
    let large = select(a, b, swapped);
    let small = select(b, a, swapped);
    let differ = sign_bit_f64(a) != sign_bit_f64(b);
    let exponent = max(exponent_bits_f64(large), 1);
    let apart = bitcast<u32>(exponent - max(exponent_bits_f64(small), 1));
    let others = shift_right_sticky(shift_left_pair(digits_f64(small), 9u), apart);
    let sum = add_pair(shift_left_pair(digits_f64(large), 9u), select(others, neg_pair(others), differ));
    let sign = select(sign_bit_f64(large), 0u, differ && is_zero_pair(sum));
    let result = normalize_f64(sign, exponent, sum);
    // What is no number is larger than an infinity.
    let none = is_nan_f64(large) || (differ && is_infinite_f64(small));
    return select(result, select(large, nan_f64(), none), exponent == 0x7ff);
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
fn round_either_f64(sign: u32, exponent: i32, digits: vec2<u32>) -> vec2<u32> {
    // As round_f64, for digits of which the first is at bit 61 or 62.
    let low = (digits.y >> 30u) == 0u;
    return round_f64(sign, exponent - select(0, 1, low), select(digits, double_pair(digits), low));
}
fn mul_f64(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> {
    let x = parts_f64(a);
    let y = parts_f64(b);
    let product = mul_high_sticky(shift_left_pair(x.xy, 10u), shift_left_pair(y.xy, 11u));
    let sign = sign_bit_f64(a ^ b);
    let result = round_either_f64(sign, bitcast<i32>(x.z + y.z) - 1023, product);
    let zero = is_zero_f64(a) || is_zero_f64(b);
    let infinite = is_infinite_f64(a) || is_infinite_f64(b);
    let ordinary = select(select(result, vec2<u32>(0u, sign), zero), infinity_f64(sign), infinite);
    return select(ordinary, nan_f64(), has_nan_f64(a, b) || (zero && infinite));
}
fn quotient_digit(rest: vec2<u32>, divisor: vec2<u32>) -> vec3<u32> {
    // Eleven bits of a quotient, of a divisor that starts at bit 52; first what is left of it, moved by eleven bits.
    let least = rest.y / (divisor.y + 1u);
    let left = sub_pair(rest, mul_pair(vec2<u32>(least, 0u), divisor));
    // The quotient of the upper words is the digit, or one less.
    let more = !lt_u64(left, divisor);
    let next = shift_left_pair(select(left, sub_pair(left, divisor), more), 11u);
    return vec3<u32>(next.x, next.y, least + select(0u, 1u, more));
}
fn div_f64(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> {
    let x = parts_f64(a);
    let y = parts_f64(b);
    let first = quotient_digit(shift_left_pair(x.xy, 10u), y.xy);
    let second = quotient_digit(first.xy, y.xy);
    let third = quotient_digit(second.xy, y.xy);
    let fourth = quotient_digit(third.xy, y.xy);
    let fifth = quotient_digit(fourth.xy, y.xy);
    // 55 bits, of which the first or the second is set; then seven of zero, and one that says whether something is left.
    let upper = (first.z << 20u) | (second.z << 9u) | (third.z >> 2u);
    let lower = (third.z << 30u) | (fourth.z << 19u) | (fifth.z << 8u) | select(1u, 0u, is_zero_pair(fifth.xy));
    let sign = sign_bit_f64(a ^ b);
    let result = round_either_f64(sign, bitcast<i32>(x.z - y.z) + 1022, vec2<u32>(lower, upper));
    let zero = is_zero_f64(a) || is_infinite_f64(b);
    let infinite = is_infinite_f64(a) || is_zero_f64(b);
    let ordinary = select(select(result, vec2<u32>(0u, sign), zero), infinity_f64(sign), infinite);
    // Zero by zero is both, as is an infinity by another.
    return select(ordinary, nan_f64(), has_nan_f64(a, b) || (zero && infinite));
}
fn root_digit(state: vec4<u32>, place: u32) -> vec4<u32> {
    // Six more bits of a root. The state is the root, a fraction of 54 bits, and what is left: the difference between the number
    // and the square of the root, in units of the last digit. The new digit counts units of 2^place.
    let root = state.xy;
    let left = shift_left_pair(state.zw, 6u);
    let unit = shift_left_pair(vec2<u32>(1u, 0u), place);
    let twice = double_pair(root);
    let least = left.y / (add_pair(twice, shift_left_pair(unit, 6u)).y + 1u);
    let square = shift_left_pair(vec2<u32>(least * least, 0u), place);
    let rest = sub_pair(left, add_pair(mul_pair(vec2<u32>(least, 0u), twice), square));
    // The quotient of the upper words is the digit, or one less.
    let step = add_pair(twice, shift_left_pair(vec2<u32>(2u * least + 1u, 0u), place));
    let more = !lt_u64(rest, step);
    let digit = vec2<u32>(least + select(0u, 1u, more), 0u);
    let next = select(rest, sub_pair(rest, step), more);
    return vec4<u32>(root | shift_left_pair(digit, place), next);
}
fn sqrt_f64(a: vec2<u32>) -> vec2<u32> {
    let x = parts_f64(a);
    // The exponent is made even: digits from a quarter to one, as a fraction of 54 bits.
    let odd = (x.z & 1u) == 0u;
    let digits = select(x.xy, double_pair(x.xy), odd);
    // The first six bits: a guess, a better one, and perhaps one less.
    let number = digits.y >> 10u;
    let guess = ((number * 5u) >> 9u) + 23u;
    let near = (guess + number / guess) >> 1u;
    let top = near - select(0u, 1u, near * near > number);
    let left = shift_left_pair(sub_pair(digits, vec2<u32>(0u, (top * top) << 10u)), 6u);
    var state = vec4<u32>(0u, top << 16u, left);
    state = root_digit(state, 42u);
    state = root_digit(state, 36u);
    state = root_digit(state, 30u);
    state = root_digit(state, 24u);
    state = root_digit(state, 18u);
    state = root_digit(state, 12u);
    state = root_digit(state, 6u);
    state = root_digit(state, 0u);
    let root = shift_left_pair(state.xy, 9u) | vec2<u32>(select(1u, 0u, is_zero_pair(state.zw)), 0u);
    let result = round_f64(0u, 1048 + ((bitcast<i32>(x.z) - select(1075, 1076, odd)) >> 1u), root);
    let same = is_zero_f64(a) || eq_pair(a, infinity_f64(0u));
    return select(select(result, a, same), nan_f64(), is_nan_f64(a) || (sign_bit_f64(a) != 0u && !same));
}
fn rsqrt_f64(a: vec2<u32>) -> vec2<u32> { return div_f64(vec2<u32>(0u, 0x3ff00000u), sqrt_f64(a)); }
fn f64_of_u64(a: vec2<u32>) -> vec2<u32> {
    // The first digit at bit 62 at most; the last bit stays, whatever is cut off.
    let large = is_negative_pair(a);
    let digits = select(a, vec2<u32>((a.x >> 1u) | (a.y << 31u) | (a.x & 1u), a.y >> 1u), large);
    return normalize_f64(0u, select(1084, 1085, large), digits);
}
fn f64_of_i64(a: vec2<u32>) -> vec2<u32> {
    let result = f64_of_u64(abs_pair(a));
    return vec2<u32>(result.x, result.y | (a.y & 0x80000000u));
}
fn f64_of_i32(a: i32) -> vec2<u32> {
    let sign = bitcast<u32>(a) & 0x80000000u;
    return normalize_f64(sign, 1084, vec2<u32>(bitcast<u32>(abs_i32(a)), 0u));
}
fn f64_of_u32(a: u32) -> vec2<u32> { return normalize_f64(0u, 1084, vec2<u32>(a, 0u)); }
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
    var digits = shift_right_sticky(digits_f64(a), 22u).x;
    if (exponent < 0) { digits = shift_right_sticky(vec2<u32>(digits, 0u), bitcast<u32>(-exponent)).x; }
    let cut = digits & 0x7fu;
    var result = digits >> 7u;
    if (cut > 0x40u || (cut == 0x40u && (result & 1u) != 0u)) { result += 1u; }
    return bitcast<f32>(sign | (result + (bitcast<u32>(max(exponent, 0)) << 23u)));
}
fn whole_f64(a: vec2<u32>) -> vec2<u32> {
    // The digits before the point of a number below 2^64, without its sign.
    let exponent = exponent_bits_f64(a) - 1075;
    if (exponent >= 0) { return shift_left_pair(digits_f64(a), bitcast<u32>(exponent)); }
    return shift_right_pair(digits_f64(a), bitcast<u32>(-exponent));
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
