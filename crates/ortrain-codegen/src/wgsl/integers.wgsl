// Integers: pairs of words, low one first, and what WGSL says otherwise than expressions do.
fn pair(low: u32, high: u32) -> vec2<u32> { return vec2<u32>(low, high); }
fn low(a: vec2<u32>) -> u32 { return a.x; }
fn high(a: vec2<u32>) -> u32 { return a.y; }
fn int_of(bits: u32) -> i32 { return bitcast<i32>(bits); }
fn bits_of_int(a: i32) -> u32 { return bitcast<u32>(a); }
fn pair_of_i32(a: i32) -> vec2<u32> { return vec2<u32>(bitcast<u32>(a), bitcast<u32>(a >> 31u)); }
fn pair_of_u32(a: u32) -> vec2<u32> { return vec2<u32>(a, 0u); }
fn is_zero_pair(a: vec2<u32>) -> bool { return (a.x | a.y) == 0u; }
fn is_negative_pair(a: vec2<u32>) -> bool { return (a.y >> 31u) != 0u; }
fn add_pair(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> {
    let sum = a.x + b.x;
    return vec2<u32>(sum, a.y + b.y + select(0u, 1u, sum < a.x));
}
fn neg_pair(a: vec2<u32>) -> vec2<u32> { return add_pair(vec2<u32>(~a.x, ~a.y), vec2<u32>(1u, 0u)); }
fn sub_pair(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> {
    return vec2<u32>(a.x - b.x, a.y - b.y - select(0u, 1u, a.x < b.x));
}
fn mul_words(a: u32, b: u32) -> vec2<u32> {
    let al = a & 0xffffu;
    let ah = a >> 16u;
    let bl = b & 0xffffu;
    let bh = b >> 16u;
    let ll = al * bl;
    let middle = ah * bl + (ll >> 16u);
    let other = al * bh + (middle & 0xffffu);
    return vec2<u32>((other << 16u) | (ll & 0xffffu), ah * bh + (middle >> 16u) + (other >> 16u));
}
fn mul_pair(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> {
    let product = mul_words(a.x, b.x);
    return vec2<u32>(product.x, product.y + a.x * b.y + a.y * b.x);
}
fn eq_pair(a: vec2<u32>, b: vec2<u32>) -> bool { return a.x == b.x && a.y == b.y; }
fn lt_u64(a: vec2<u32>, b: vec2<u32>) -> bool { return a.y < b.y || (a.y == b.y && a.x < b.x); }
fn lt_i64(a: vec2<u32>, b: vec2<u32>) -> bool {
    return lt_u64(vec2<u32>(a.x, a.y ^ 0x80000000u), vec2<u32>(b.x, b.y ^ 0x80000000u));
}
fn min_i64(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> { return select(a, b, lt_i64(b, a)); }
fn max_i64(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> { return select(a, b, lt_i64(a, b)); }
fn min_u64(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> { return select(a, b, lt_u64(b, a)); }
fn max_u64(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> { return select(a, b, lt_u64(a, b)); }
fn abs_pair(a: vec2<u32>) -> vec2<u32> { return select(a, neg_pair(a), is_negative_pair(a)); }
fn sign_i64(a: vec2<u32>) -> vec2<u32> {
    let positive = vec2<u32>(select(1u, 0u, is_zero_pair(a)), 0u);
    return select(positive, vec2<u32>(0xffffffffu, 0xffffffffu), is_negative_pair(a));
}
fn sign_u64(a: vec2<u32>) -> vec2<u32> { return vec2<u32>(select(1u, 0u, is_zero_pair(a)), 0u); }
fn shift_left_pair(a: vec2<u32>, by: u32) -> vec2<u32> {
    let part = by & 31u;
    let moved = vec2<u32>(a.x << part, (a.y << part) | ((a.x >> 1u) >> (31u - part)));
    return select(select(moved, vec2<u32>(0u, moved.x), by >= 32u), vec2<u32>(0u, 0u), by >= 64u);
}
fn shift_right_pair(a: vec2<u32>, by: u32) -> vec2<u32> {
    let part = by & 31u;
    let moved = vec2<u32>((a.x >> part) | ((a.y << 1u) << (31u - part)), a.y >> part);
    return select(select(moved, vec2<u32>(moved.y, 0u), by >= 32u), vec2<u32>(0u, 0u), by >= 64u);
}
fn divide_u64(a: vec2<u32>, b: vec2<u32>) -> vec4<u32> {
    // Quotient and remainder, bit by bit.
    if (is_zero_pair(b)) { return vec4<u32>(0u, 0u, 0u, 0u); }
    if ((a.y | b.y) == 0u) { return vec4<u32>(a.x / b.x, 0u, a.x % b.x, 0u); }
    var quotient = vec2<u32>(0u, 0u);
    var rest = vec2<u32>(0u, 0u);
    for (var k: i32 = 63; k >= 0; k--) {
        let carry = rest.y >> 31u;
        rest = shift_left_pair(rest, 1u);
        rest.x |= shift_right_pair(a, u32(k)).x & 1u;
        quotient = shift_left_pair(quotient, 1u);
        if (carry != 0u || !lt_u64(rest, b)) {
            rest = sub_pair(rest, b);
            quotient.x |= 1u;
        }
    }
    return vec4<u32>(quotient.x, quotient.y, rest.x, rest.y);
}
fn div_u64(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> { return divide_u64(a, b).xy; }
fn rem_u64(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> { return divide_u64(a, b).zw; }
fn div_i64(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> {
    let quotient = divide_u64(abs_pair(a), abs_pair(b)).xy;
    return select(quotient, neg_pair(quotient), is_negative_pair(a) != is_negative_pair(b));
}
fn rem_i64(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> {
    let rest = divide_u64(abs_pair(a), abs_pair(b)).zw;
    return select(rest, neg_pair(rest), is_negative_pair(a));
}
fn pow_i64(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> {
    let one = vec2<u32>(1u, 0u);
    if (b.y != 0u) {
        let minus_one = vec2<u32>(0xffffffffu, 0xffffffffu);
        if (eq_pair(a, one) || (eq_pair(a, minus_one) && (b.x & 1u) == 0u)) { return one; }
        return select(vec2<u32>(0u, 0u), minus_one, eq_pair(a, minus_one));
    }
    var power = one;
    var square = a;
    var rest = b.x;
    while (rest != 0u) {
        if ((rest & 1u) != 0u) { power = mul_pair(power, square); }
        square = mul_pair(square, square);
        rest = rest >> 1u;
    }
    return power;
}
fn and_pair(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> { return a & b; }
fn or_pair(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> { return a | b; }
fn xor_pair(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> { return a ^ b; }
fn div_i32(a: i32, b: i32) -> i32 {
    if (b == 0) { return 0; }
    if (b == -1) { return bitcast<i32>(0u - bitcast<u32>(a)); }
    return a / b;
}
fn rem_i32(a: i32, b: i32) -> i32 {
    if (b == 0 || b == -1) { return 0; }
    return a % b;
}
fn div_u32(a: u32, b: u32) -> u32 {
    if (b == 0u) { return 0u; }
    return a / b;
}
fn rem_u32(a: u32, b: u32) -> u32 {
    if (b == 0u) { return 0u; }
    return a % b;
}
fn neg_i32(a: i32) -> i32 { return bitcast<i32>(0u - bitcast<u32>(a)); }
fn abs_i32(a: i32) -> i32 { return select(a, neg_i32(a), a < 0); }
fn sign_i32(a: i32) -> i32 { return select(0, 1, a > 0) - select(0, 1, a < 0); }
fn sign_u32(a: u32) -> u32 { return min(a, 1u); }
fn random_bits(key: vec2<u32>, stream: vec2<u32>, index: vec2<u32>) -> u32 {
    // Word index % 4 of block index / 4 by Philox4x32-10.
    let block = shift_right_pair(index, 2u);
    var words = vec4<u32>(block.x, block.y, stream.x, stream.y);
    var keys = key;
    for (var round: i32 = 0; round < 10; round++) {
        let even = mul_words(0xD2511F53u, words.x);
        let odd = mul_words(0xCD9E8D57u, words.z);
        words = vec4<u32>(odd.y ^ words.y ^ keys.x, odd.x, even.y ^ words.w ^ keys.y, even.x);
        keys = vec2<u32>(keys.x + 0x9E3779B9u, keys.y + 0xBB67AE85u);
    }
    let word = index.x & 3u;
    return select(select(words.x, words.y, word == 1u), select(words.z, words.w, word == 3u), word >= 2u);
}
