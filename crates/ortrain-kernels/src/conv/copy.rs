//! From tensors to strips, and from strips (or tensors read in place) to the rows of a product.

use ortrain_expr::DType;

use super::patches::{Patches, SLACK, Segment};
use crate::gemm::micro::Real;
use crate::isa::{Isa, Level, Work};
use crate::tape::number::{Brain, Half, Number, Stored};

/// Copies what a range of positions sees of some channels into strips.
struct Fill<'a, S: Stored> {
    patches: &'a Patches,
    positions: (usize, usize),
    /// The first channel's plane, and how many channels there are.
    from: *const S,
    channels: usize,
    to: *mut S::Computed,
}

/// Copies elements `step` apart. Touches no other.
///
/// # Safety
/// They are valid for reads; `to` has room for them.
#[inline(always)]
unsafe fn gather<S: Stored>(from: *const S, step: usize, count: usize, to: *mut S::Computed) {
    // SAFETY: the caller's contract.
    unsafe {
        match step {
            1 => {
                for i in 0..count {
                    to.add(i).write(from.add(i).read_unaligned().decode());
                }
            }
            2 => {
                for i in 0..count {
                    to.add(i).write(from.add(2 * i).read_unaligned().decode());
                }
            }
            _ => {
                for i in 0..count {
                    to.add(i).write(from.wrapping_add(step * i).read_unaligned().decode());
                }
            }
        }
    }
}

impl<S: Stored<Computed: Number>> Work for Fill<'_, S> {
    type Out = ();
    #[inline(always)]
    fn work<L: Level>(self) {
        let Fill { patches, positions: (begin, end), from, channels, to } = self;
        let zero = <S::Computed as Number>::ZERO;
        let width = patches.strip_width();
        for c in 0..channels {
            let (from, to) =
                (from.wrapping_add(c * patches.plane), to.wrapping_add(c * patches.strip.elements));
            patches.strip_rows(begin, end, |at, row| {
                patches.row_runs(begin, end, |offset, run| {
                    let to = to.wrapping_add(at + offset);
                    // SAFETY: the strip has room for its rows; runs lie inside the tensor's.
                    unsafe {
                        let Some(row) = row else {
                            for i in 0..width {
                                to.add(i).write(zero);
                            }
                            return;
                        };
                        for i in 0..run.zeros {
                            to.add(i).write(zero);
                        }
                        let from = from.wrapping_add(row + run.first);
                        gather(from, patches.cols.step, run.count, to.add(run.zeros));
                        for i in run.zeros + run.count..width {
                            to.add(i).write(zero);
                        }
                    }
                });
            });
        }
    }
}

/// Copies what the positions see of `channels` planes from `from` on into strips, one for each channel.
///
/// # Safety
/// The planes are there in each image of the range; `to` has room for the strips. `dtype` is computed as `T`.
pub(super) unsafe fn fill<T: Real>(
    isa: Isa,
    dtype: DType,
    patches: &Patches,
    positions: (usize, usize),
    from: *const u8,
    channels: usize,
    to: *mut T,
) {
    macro_rules! go {
        ($s:ty) => {
            isa.run(Fill::<$s> { patches, positions, from: from.cast(), channels, to: to.cast() })
        };
    }
    match dtype {
        DType::F32 => go!(f32),
        DType::F64 => go!(f64),
        DType::F16 => go!(Half),
        DType::BF16 => go!(Brain),
        other => unreachable!("a convolution of {other}: checked when compiled"),
    }
}

/// Rows of a product: one for each channel and tap, each made of segments.
#[derive(Clone, Copy)]
pub(super) struct Rows<'a, T> {
    /// The first channel's strip or plane, the number of elements that may be read from there on, and the step from
    /// channel to channel.
    pub(super) from: *const T,
    pub(super) limit: usize,
    pub(super) channel: usize,
    pub(super) channels: usize,
    pub(super) taps: &'a [isize],
    /// Whether taps change faster than channels from row to row.
    pub(super) taps_inside: bool,
    pub(super) segments: &'a [Segment],
    /// Elements at the end of each row that are set to zero, and where they start.
    pub(super) tail: (usize, usize),
    /// Elements from row to row.
    pub(super) pitch: usize,
    /// What lies beyond the end of a row, up to [`SLACK`] elements, is overwritten, before the next row is made.
    pub(super) to: *mut T,
}

const WIDE: usize = 16;
const NARROW: usize = 8;

impl<T: Real> Rows<'_, T> {
    /// One row. `EXACT`: touches nothing but what it copies.
    #[inline(always)]
    unsafe fn row<const EXACT: bool>(&self, from: *const T, to: *mut T) {
        for segment in self.segments {
            let (from, to) = (from.wrapping_offset(segment.from), to.wrapping_add(segment.to as usize));
            let len = segment.len as usize;
            // SAFETY: the caller's contract.
            unsafe {
                if EXACT {
                    std::ptr::copy_nonoverlapping(from.cast::<u8>(), to.cast(), len * T::BYTES);
                } else if len > NARROW {
                    for i in (0..len).step_by(WIDE) {
                        let line = from.add(i).cast::<[T; WIDE]>().read_unaligned();
                        to.add(i).cast::<[T; WIDE]>().write_unaligned(line);
                    }
                } else {
                    let line = from.cast::<[T; NARROW]>().read_unaligned();
                    to.cast::<[T; NARROW]>().write_unaligned(line);
                }
            }
        }
        let (at, count) = self.tail;
        for i in at..at + count {
            // SAFETY: the row has these elements.
            unsafe { to.add(i).write(T::ZERO) };
        }
    }
}

impl<T: Real> Work for Rows<'_, T> {
    type Out = ();
    #[inline(always)]
    fn work<L: Level>(self) {
        let reach = self.segments.iter().map(|segment| {
            segment.from as usize
                + (segment.len as usize).next_multiple_of(if segment.len as usize > NARROW {
                    WIDE
                } else {
                    NARROW
                })
        });
        let reach = reach.max().unwrap_or(0);
        let count = self.channels * self.taps.len();
        let (mut channel, mut tap) = (0, 0);
        for row in 0..count {
            let offset = (channel * self.channel) as isize + self.taps[tap];
            let from = self.from.wrapping_offset(offset);
            let to = self.to.wrapping_add(row * self.pitch);
            // SAFETY: by the contract of `rows` segments lie inside the strip or the tensor.
            unsafe {
                if offset as usize + reach <= self.limit {
                    self.row::<false>(from, to);
                } else {
                    self.row::<true>(from, to);
                }
            }
            if self.taps_inside {
                tap += 1;
                if tap == self.taps.len() {
                    (tap, channel) = (0, channel + 1);
                }
            } else {
                channel += 1;
                if channel == self.channels {
                    (channel, tap) = (0, tap + 1);
                }
            }
        }
    }
}

/// Makes rows.
///
/// # Safety
/// Segments lie inside the strips or planes, and after the last row there is room for [`SLACK`] elements more.
pub(super) unsafe fn rows<T: Real>(isa: Isa, rows: Rows<'_, T>) {
    const { assert!(WIDE <= SLACK) };
    isa.run(rows);
}
