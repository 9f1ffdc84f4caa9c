//! Copies from tensors to strips, and from strips (or tensors that are read in place) to the rows of a product.

use std::any::TypeId;

use ortrain_expr::DType;

use super::im2col::{Band, Patches, Run, SLACK, Segment};
use crate::gemm::levels::Real;
use crate::isa::{Isa, Level, Work, prefetch};
use crate::tile::number::{Bf16, F16, Number, Stored};

/// Number of elements that are copied at once.
const WIDE: usize = 16;
const NARROW: usize = 8;

/// Copies the elements of some channels that a range of positions sees into strips.
struct FillStrips<'a, S: Stored> {
    patches: &'a Patches,
    positions: (usize, usize),
    /// Plane of the first channel, and number of channels.
    from: *const S,
    channels: usize,
    to: *mut S::Computed,
}

/// Reads sixteen elements with step two. Reads nothing after the last one.
///
/// # Safety
/// The elements, and the elements between them, are valid for reads.
#[inline(always)]
unsafe fn load_every_second<S: Stored>(from: *const S) -> [S::Computed; WIDE] {
    // SAFETY: the caller's contract.
    unsafe {
        let low = from.cast::<[S; WIDE]>().read_unaligned();
        let high = from.add(WIDE - 1).cast::<[S; WIDE]>().read_unaligned();
        std::array::from_fn(|i| if i < WIDE / 2 { low[2 * i] } else { high[2 * i + 1 - WIDE] }.decode())
    }
}

/// Copies elements with step `step`. Reads nothing after the last one.
///
/// # Safety
/// The elements, and the elements between them, are valid for reads. `to` is aligned, and valid for writes of `count`
/// elements.
#[inline(always)]
unsafe fn gather<S: Stored>(from: *const S, step: usize, count: usize, to: *mut S::Computed) {
    // The last vector ends with the elements, and may overlap the vector before it.
    macro_rules! vectors {
        ($v:ident, $read:expr) => {
            for i in (0..count).step_by($v) {
                let i = i.min(count - $v);
                // SAFETY: the caller's contract.
                unsafe { to.add(i).cast::<[S::Computed; $v]>().write_unaligned($read(from.add(step * i))) };
            }
        };
    }
    match step {
        1 if count >= WIDE => {
            vectors!(WIDE, |from: *const S| from.cast::<[S; WIDE]>().read_unaligned().map(S::decode));
        }
        1 if count >= NARROW => {
            vectors!(NARROW, |from: *const S| from.cast::<[S; NARROW]>().read_unaligned().map(S::decode));
        }
        2 if count >= WIDE => vectors!(WIDE, |from| load_every_second::<S>(from)),
        _ => {
            for i in 0..count {
                // SAFETY: the caller's contract.
                unsafe { to.add(i).write(from.wrapping_add(step * i).read_unaligned().decode()) };
            }
        }
    }
}

/// Copies a band of at least [`NARROW`] columns.
///
/// # Safety
/// The elements of the band are valid for reads in the channel, and for writes in the strip.
#[inline(always)]
unsafe fn copy_band<S: Stored>(band: &Band, from: *const S, to: *mut S::Computed) {
    let &Band { rows, count, .. } = band;
    let wide_len = count - count % WIDE;
    for row in 0..rows {
        let from = from.wrapping_add(band.from + row * band.from_step);
        let to = to.wrapping_add(band.to + row * band.to_step);
        macro_rules! vector {
            ($v:ident, $i:expr) => {{
                let i = $i;
                // SAFETY: the caller's contract.
                unsafe {
                    let line = from.add(i).cast::<[S; $v]>().read_unaligned().map(S::decode);
                    to.add(i).cast::<[S::Computed; $v]>().write_unaligned(line);
                }
            }};
        }
        for i in (0..wide_len).step_by(WIDE) {
            vector!(WIDE, i);
        }
        // The last vectors may overlap the vectors before them.
        if count - wide_len > NARROW {
            vector!(NARROW, wide_len);
        }
        if count > wide_len {
            vector!(NARROW, count - NARROW);
        }
    }
}

/// Separates the even and the odd elements of a row.
///
/// # Safety
/// As [`copy_band`], for the elements of both runs.
#[inline(always)]
unsafe fn deinterleave<S: Stored>(pair: &[(usize, Run); 2], from: *const S, to: *mut S::Computed) {
    let [(even, evens), (odd, odds)] = pair;
    let from = from.wrapping_add(evens.first);
    let (even, odd) = (to.wrapping_add(*even), to.wrapping_add(*odd));
    let both = evens.count.min(odds.count);
    let narrow_len = both - both % NARROW;
    // SAFETY: the caller's contract.
    unsafe {
        for i in (0..narrow_len).step_by(NARROW) {
            let line = from.add(2 * i).cast::<[S; 2 * NARROW]>().read_unaligned();
            let parted = |parity: usize| std::array::from_fn(|k| line[2 * k + parity].decode());
            even.add(i).cast::<[S::Computed; NARROW]>().write_unaligned(parted(0));
            odd.add(i).cast::<[S::Computed; NARROW]>().write_unaligned(parted(1));
        }
        for i in narrow_len..evens.count {
            even.add(i).write_unaligned(from.add(2 * i).read_unaligned().decode());
        }
        for i in narrow_len..odds.count {
            odd.add(i).write_unaligned(from.add(2 * i + 1).read_unaligned().decode());
        }
    }
}

impl<S: Stored> Work for FillStrips<'_, S> {
    type Out = ();
    #[inline(always)]
    fn work<L: Level>(self) {
        let FillStrips { patches, positions: (begin, end), from, channels, to } = self;
        let band = patches.band(begin, end).filter(|band| band.count >= NARROW);
        let pair = patches.stride_two_runs();
        for c in 0..channels {
            let from = from.wrapping_add(c * patches.plane);
            let to = to.wrapping_add(c * patches.strip.elements);
            if let Some(band) = band {
                // SAFETY: as below.
                unsafe { copy_band(&band, from, to) };
                continue;
            }
            patches.for_each_strip_row(begin, end, |at, row| {
                if let Some(pair) = pair {
                    // SAFETY: as below.
                    unsafe { deinterleave(&pair, from.wrapping_add(row), to.wrapping_add(at)) };
                    return;
                }
                patches.for_each_run(begin, end, |offset, run| {
                    let to = to.wrapping_add(at + offset + run.zeros);
                    // SAFETY: the strip has capacity for its rows, and runs are inside of the tensor's rows.
                    unsafe { gather(from.wrapping_add(row + run.first), patches.cols.step, run.count, to) };
                });
            });
        }
    }
}

/// Copies the elements that the positions see of `channels` planes from `from` on into strips, one strip for each
/// channel. Padding is not written: it is the same for all channels, so strips are zeroed once for each range of
/// positions.
///
/// # Safety
/// The planes are valid for reads in each image of the range. `to` has capacity for the strips. The compute type of
/// `dtype` is `T`.
pub(super) unsafe fn fill_strips<T: Real>(
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
            isa.run(FillStrips::<$s> { patches, positions, from: from.cast(), channels, to: to.cast() })
        };
    }
    match dtype {
        DType::F32 => go!(f32),
        DType::F64 => go!(f64),
        DType::F16 => go!(F16),
        DType::BF16 => go!(Bf16),
        other => unreachable!("a convolution of {other}: rejected at compile time"),
    }
}

/// Rows of a product: one for each channel and tap, each copied from segments.
#[derive(Clone, Copy)]
pub(super) struct RowCopy<'a, T> {
    /// Strip or plane of the first channel, number of elements that may be read from there on, and step from channel to
    /// channel.
    pub(super) from: *const T,
    pub(super) limit: usize,
    pub(super) channel: usize,
    pub(super) channels: usize,
    pub(super) taps: &'a [isize],
    /// True if taps change faster than channels from row to row.
    pub(super) taps_are_inner: bool,
    pub(super) segments: &'a [Segment],
    /// Elements at the end of each row that are set to zero: their start, and their number.
    pub(super) tail: (usize, usize),
    /// Number of elements from row to row.
    pub(super) pitch: usize,
    /// Destination. Up to [`SLACK`] elements after the end of a row are overwritten, before the next row is written.
    pub(super) to: *mut T,
}

/// Up to sixteen elements of a row that are near each other, from any number of segments.
#[derive(Clone, Copy)]
struct Pick {
    from: isize,
    to: u32,
    /// Number of elements, and their indices relative to `from`.
    len: u32,
    index: [u32; WIDE],
}

/// Number of elements that a pick can reach.
const PICK_REACH: usize = 2 * WIDE;
/// Maximum number of picks of a row.
const MAX_PICKS: usize = 80;

impl<T: Real> RowCopy<'_, T> {
    /// Converts the segments into picks. Returns the number of picks, if they are less work.
    #[inline(always)]
    fn make_picks(&self, picks: &mut [Pick; MAX_PICKS]) -> Option<usize> {
        let mut pick = Pick { from: 0, to: 0, len: 0, index: [0; WIDE] };
        let (mut count, mut vectors) = (0, 0);
        for segment in self.segments {
            vectors += segment.len.div_ceil(WIDE as u32) as usize;
            for i in 0..segment.len {
                let (from, to) = (segment.from + i as isize, segment.to + i);
                let is_near = from >= pick.from && from < pick.from + PICK_REACH as isize;
                if pick.len == WIDE as u32 || !is_near || to != pick.to + pick.len {
                    if pick.len > 0 {
                        *picks.get_mut(count)? = pick;
                        count += 1;
                    }
                    pick = Pick { from, to, len: 0, index: [0; WIDE] };
                }
                pick.index[pick.len as usize] = (from - pick.from) as u32;
                pick.len += 1;
            }
        }
        *picks.get_mut(count)? = pick;
        count += 1;
        // A segment costs about as much as three vectors.
        (2 * count < 3 * self.segments.len() + vectors).then_some(count)
    }

    /// Copies one row from picks. Reads [`PICK_REACH`] elements from the first element of each pick on.
    #[inline(always)]
    unsafe fn copy_picks<L: Level>(&self, picks: &[Pick], from: *const T, to: *mut T) {
        for pick in picks {
            let (from, to) = (from.wrapping_offset(pick.from), to.wrapping_add(pick.to as usize));
            // SAFETY: the caller's contract; picks exist for f32 only.
            unsafe { L::select_16_of_32(from.cast(), &pick.index, to.cast()) };
        }
        self.zero_tail(to);
    }

    /// Copies one row. `EXACT`: reads and writes nothing but the copied elements.
    #[inline(always)]
    unsafe fn copy_row<const EXACT: bool>(&self, from: *const T, to: *mut T) {
        for segment in self.segments {
            let (from, to) = (from.wrapping_offset(segment.from), to.wrapping_add(segment.to as usize));
            let len = segment.len as usize;
            // SAFETY: the caller's contract.
            unsafe {
                if EXACT {
                    std::ptr::copy_nonoverlapping(from.cast::<u8>(), to.cast(), len * T::BYTES);
                } else if len > NARROW {
                    // The row of the next channel is on another page, which hardware prefetchers do not reach.
                    if self.taps.len() == 1 {
                        prefetch(from.wrapping_add(self.channel));
                    }
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
        self.zero_tail(to);
    }

    /// Zeroes the end of a row.
    #[inline(always)]
    fn zero_tail(&self, to: *mut T) {
        let (at, count) = self.tail;
        for i in at..at + count {
            // SAFETY: the row has these elements.
            unsafe { to.add(i).write(T::ZERO) };
        }
    }
}

impl<T: Real> Work for RowCopy<'_, T> {
    type Out = ();
    #[inline(always)]
    fn work<L: Level>(self) {
        let mut picks = [Pick { from: 0, to: 0, len: 0, index: [0; WIDE] }; MAX_PICKS];
        let picked =
            if L::HAS_FAST_SELECT && TypeId::of::<T>() == TypeId::of::<f32>() && !self.segments.is_empty() {
                self.make_picks(&mut picks).unwrap_or(0)
            } else {
                0
            };
        let picks = &picks[..picked];
        let reach = if picked > 0 {
            picks.iter().map(|pick| pick.from as usize + PICK_REACH).max()
        } else {
            let vectors = |len: usize| len.next_multiple_of(if len > NARROW { WIDE } else { NARROW });
            self.segments.iter().map(|segment| segment.from as usize + vectors(segment.len as usize)).max()
        };
        let reach = reach.unwrap_or(0);
        let count = self.channels * self.taps.len();
        let (mut channel, mut tap) = (0, 0);
        for row in 0..count {
            let offset = (channel * self.channel) as isize + self.taps[tap];
            let from = self.from.wrapping_offset(offset);
            let to = self.to.wrapping_add(row * self.pitch);
            // SAFETY: by the contract of `rows` segments are inside of the strip or the tensor.
            unsafe {
                if offset as usize + reach > self.limit {
                    self.copy_row::<true>(from, to);
                } else if picked > 0 {
                    self.copy_picks::<L>(picks, from, to);
                } else {
                    self.copy_row::<false>(from, to);
                }
            }
            if self.taps_are_inner {
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

/// Copies rows.
///
/// # Safety
/// Segments are inside of the strips or planes. After the last row of `to` there is capacity for [`SLACK`] more
/// elements.
pub(super) unsafe fn copy_rows<T: Real>(isa: Isa, rows: RowCopy<'_, T>) {
    const { assert!(WIDE <= SLACK && PICK_REACH <= SLACK) };
    isa.run(rows);
}

/// Copies a range of positions of some channels, line by line.
struct LineCopy<S: Stored> {
    from: *const S,
    /// Elements from channel to channel, and from image to image.
    plane: usize,
    image: usize,
    count: usize,
    positions: (usize, usize),
    to: *mut S::Computed,
    pitch: usize,
}

impl<S: Stored<Computed: Number>> Work for LineCopy<S> {
    type Out = ();
    #[inline(always)]
    fn work<L: Level>(self) {
        let LineCopy { from, plane, image, count, positions: (begin, end), to, pitch } = self;
        let zero = <S::Computed as Number>::ZERO;
        for line in 0..count {
            let to = to.wrapping_add(line * pitch);
            let mut at = begin;
            while at < end {
                let len = (plane - at % plane).min(end - at);
                let from = from.wrapping_add(at / plane * image + line * plane + at % plane);
                // SAFETY: the contract of `lines`.
                unsafe {
                    gather(from, 1, len, to.add(at - begin));
                }
                at += len;
            }
            for i in end - begin..pitch {
                // SAFETY: as above.
                unsafe { to.add(i).write(zero) };
            }
        }
    }
}

/// Copies the positions `begin..end` of `count` channels, line by line. Lines are `pitch` elements apart, with zeros
/// between them. `plane` and `image` are the steps from channel to channel and from image to image.
///
/// # Safety
/// The elements are valid for reads. `to` is aligned, and has capacity for `count` lines of `pitch` elements. The
/// compute type of `dtype` is `T`.
pub(super) unsafe fn copy_lines<T: Real>(
    isa: Isa,
    dtype: DType,
    from: *const u8,
    (plane, image): (usize, usize),
    count: usize,
    positions: (usize, usize),
    to: *mut T,
    pitch: usize,
) {
    macro_rules! go {
        ($s:ty) => {
            isa.run(LineCopy::<$s> {
                from: from.cast(),
                plane,
                image,
                count,
                positions,
                to: to.cast(),
                pitch,
            })
        };
    }
    match dtype {
        DType::F32 => go!(f32),
        DType::F64 => go!(f64),
        DType::F16 => go!(F16),
        DType::BF16 => go!(Bf16),
        DType::I32 => go!(i32),
        other => unreachable!("a convolution of {other}: rejected at compile time"),
    }
}

struct AddParts<T> {
    from: *const T,
    from_step: usize,
    parts: usize,
    part_step: usize,
    lines: usize,
    len: usize,
    to: *mut T,
    to_step: usize,
}

impl<T: Real> Work for AddParts<T> {
    type Out = ();
    #[inline(always)]
    fn work<L: Level>(self) {
        let AddParts { from, from_step, parts, part_step, lines, len, to, to_step } = self;
        for line in 0..lines {
            let (from, to) = (from.wrapping_add(line * from_step), to.wrapping_add(line * to_step));
            for start in (0..len).step_by(WIDE) {
                let (from, to) = (from.wrapping_add(start), to.wrapping_add(start));
                // SAFETY: the contract of `add_parts`.
                unsafe {
                    if len - start < WIDE {
                        for i in 0..len - start {
                            let part = |part: usize| from.wrapping_add(part * part_step + i).read();
                            let sum = (1..parts).fold(part(0), |sum, p| sum.add(part(p)));
                            to.add(i).write(sum);
                        }
                        continue;
                    }
                    let part = |part: usize| from.wrapping_add(part * part_step).cast::<[T; WIDE]>().read();
                    let mut sum = part(0);
                    for p in 1..parts {
                        let more = part(p);
                        for (sum, more) in sum.iter_mut().zip(more) {
                            *sum = sum.add(more);
                        }
                    }
                    to.cast::<[T; WIDE]>().write(sum);
                }
            }
        }
    }
}

/// Adds the parts of some lines, element by element and in order. `parts`: number of parts, and step from part to part.
///
/// # Safety
/// The elements of all parts are valid for reads, and `to` is valid for writes of the lines. Both are aligned.
pub(super) unsafe fn add_parts<T: Real>(
    isa: Isa,
    from: *const T,
    from_step: usize,
    (parts, part_step): (usize, usize),
    (lines, len): (usize, usize),
    to: *mut T,
    to_step: usize,
) {
    isa.run(AddParts { from, from_step, parts, part_step, lines, len, to, to_step });
}
