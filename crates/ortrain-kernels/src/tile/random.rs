//! Random bits of tile programs.

use ortrain_expr::{philox4x32_10_blocks, random_bits};

use super::ops::{values, values_mut};
use crate::isa::{Isa, Level, Work};

/// Random bits `d`, from keys, streams and indices.
struct Philox<'a> {
    keys: &'a [u64],
    streams: &'a [u64],
    indices: &'a [u64],
    d: &'a mut [u32],
}

impl Philox<'_> {
    /// Returns the key, the stream and the first index if all keys and all streams are equal and indices count up by
    /// one. This is the case over tensors.
    #[inline(always)]
    fn consecutive_indices(&self) -> Option<[u64; 3]> {
        let (&key, &stream, &first) = (self.keys.first()?, self.streams.first()?, self.indices.first()?);
        first.checked_add(self.d.len() as u64)?;
        let differ =
            |values: &[u64], value: u64| values.iter().fold(0, |differ, &other| differ | (other ^ value));
        let mut due = first;
        let jumps = self.indices.iter().fold(0, |jumps, &index| {
            let jump = index ^ due;
            due = due.wrapping_add(1);
            jumps | jump
        });
        (differ(self.keys, key) | differ(self.streams, stream) | jumps == 0).then_some([key, stream, first])
    }
}

impl Work for Philox<'_> {
    type Out = ();
    #[inline(always)]
    fn work<L: Level>(self) {
        let Some([key, stream, first]) = self.consecutive_indices() else {
            let arguments = self.keys.iter().zip(self.streams).zip(self.indices);
            for (d, ((&key, &stream), &index)) in self.d.iter_mut().zip(arguments) {
                *d = random_bits(key, stream, index);
            }
            return;
        };
        // Words of a block: the first element may be any of its four words.
        let (mut block, mut skipped) = (first / 4, (first % 4) as usize);
        let mut rest = self.d;
        while !rest.is_empty() {
            let words = philox4x32_10_blocks::<PHILOX_BLOCKS>(key, stream, block);
            let words = &words.as_flattened()[skipped..];
            let n = words.len().min(rest.len());
            let (d, more) = rest.split_at_mut(n);
            d.copy_from_slice(&words[..n]);
            (rest, skipped, block) = (more, 0, block + PHILOX_BLOCKS as u64);
        }
    }
}

/// Computes random bits.
///
/// # Safety
/// `key`, `stream` and `index` are registers of `n` 64-bit values each. `d` is a register of `n` 32-bit values, and
/// overlaps no operand.
pub(crate) unsafe fn random(
    isa: Isa,
    key: *const u8,
    stream: *const u8,
    index: *const u8,
    d: *mut u8,
    n: usize,
) {
    // SAFETY: the caller's contract.
    let (keys, streams, indices, d) =
        unsafe { (values(key, n), values(stream, n), values(index, n), values_mut(d, n)) };
    isa.run(Philox { keys, streams, indices, d });
}

/// Number of Philox blocks that are computed at once, as vector code.
const PHILOX_BLOCKS: usize = 8;
