//! Counter-based random number generator Philox4x32-10.

/// Multipliers of the first and the third word of a counter in each round.
const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
/// Increments of the words of a key between rounds.
const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];
/// Number of rounds of Philox4x32-10.
const ROUNDS: usize = 10;
/// Number of 32-bit words of a block.
const WORDS_PER_BLOCK: u64 = 4;

/// Returns the four words of Philox4x32-10 for a key and the counter `(block, stream)`, low words first.
///
/// Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
#[inline]
#[must_use]
pub fn philox4x32_10(key: u64, stream: u64, block: u64) -> [u32; 4] {
    let mut counter = [block as u32, (block >> 32) as u32, stream as u32, (stream >> 32) as u32];
    let mut key = [key as u32, (key >> 32) as u32];
    for round in 0..ROUNDS {
        if round > 0 {
            key = [key[0].wrapping_add(WEYL[0]), key[1].wrapping_add(WEYL[1])];
        }
        let first = u64::from(MULTIPLIERS[0]) * u64::from(counter[0]);
        let second = u64::from(MULTIPLIERS[1]) * u64::from(counter[2]);
        counter = [
            (second >> 32) as u32 ^ counter[1] ^ key[0],
            second as u32,
            (first >> 32) as u32 ^ counter[3] ^ key[1],
            first as u32,
        ];
    }
    counter
}

/// Returns consecutive blocks of [`philox4x32_10`] from block `first` on, computed in vector lanes.
///
/// Block numbers wrap around: block 0 follows block `u64::MAX`.
#[inline(always)]
#[must_use]
pub fn philox4x32_10_blocks<const BLOCKS: usize>(key: u64, stream: u64, first: u64) -> [[u32; 4]; BLOCKS] {
    // Lanes of 64 bits hold words of 32 bits. The upper half is ignored: products read the lower half only, and the
    // result drops the upper half.
    let blocks: [u64; BLOCKS] = std::array::from_fn(|i| first.wrapping_add(i as u64));
    let mut counters = [blocks, blocks.map(|block| block >> 32), [stream; BLOCKS], [stream >> 32; BLOCKS]];
    let mut key = [key as u32, (key >> 32) as u32];
    let product = |multiplier: u32, word: u64| u64::from(multiplier) * (word & u64::from(u32::MAX));
    for _ in 0..ROUNDS {
        let [low, high] = key.map(u64::from);
        let [a, b, c, d] = &mut counters;
        for (((a, b), c), d) in a.iter_mut().zip(b).zip(c).zip(d) {
            let (even, odd) = (product(MULTIPLIERS[0], *a), product(MULTIPLIERS[1], *c));
            (*a, *b) = ((odd >> 32) ^ *b ^ low, odd);
            (*c, *d) = ((even >> 32) ^ *d ^ high, even);
        }
        key = [key[0].wrapping_add(WEYL[0]), key[1].wrapping_add(WEYL[1])];
    }
    std::array::from_fn(|i| counters.map(|words| words[i] as u32))
}

/// Returns 32-bit word `index` of a random stream: word `index % 4` of block `index / 4` of [`philox4x32_10`].
///
/// `key` is the seed. Equal arguments give equal bits on every backend.
#[inline]
#[must_use]
pub fn random_bits(key: u64, stream: u64, index: u64) -> u32 {
    philox4x32_10(key, stream, index / WORDS_PER_BLOCK)[(index % WORDS_PER_BLOCK) as usize]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Known answers of the reference implementation (Random123, `kat_vectors`).
    const KNOWN: [([u64; 3], [u32; 4]); 3] = [
        ([0, 0, 0], [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]),
        ([u64::MAX, u64::MAX, u64::MAX], [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]),
        (
            [0x299f_31d0_a409_3822, 0x0370_7344_1319_8a2e, 0x85a3_08d3_243f_6a88],
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1],
        ),
    ];

    #[test]
    fn known_answers() {
        for ([key, stream, block], words) in KNOWN {
            assert_eq!(philox4x32_10(key, stream, block), words);
            let blocks = philox4x32_10_blocks::<5>(key, stream, block.wrapping_sub(2));
            let one_by_one = [2, 1, 0].map(|k| philox4x32_10(key, stream, block.wrapping_sub(k)));
            assert_eq!((blocks[2], &blocks[..3]), (words, &one_by_one[..]));
        }
    }

    #[test]
    fn bits_are_the_words_of_blocks_in_order() {
        let words: Vec<u32> = (0..3).flat_map(|block| philox4x32_10(5, 6, block)).collect();
        let bits: Vec<u32> = (0..12).map(|index| random_bits(5, 6, index)).collect();
        assert_eq!(bits, words);
        let last = philox4x32_10(5, 6, u64::MAX / 4)[3];
        assert_eq!(random_bits(5, 6, u64::MAX), last);
    }
}
