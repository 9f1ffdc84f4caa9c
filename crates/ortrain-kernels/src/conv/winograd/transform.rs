//! Transforms of Winograd's F(2×2, 3×3): sums, differences and halves, several lanes at a time. The lanes of a value
//! are contiguous in memory. They are tiles of a row, rows of a panel of weights, or channels.

use crate::conv::winograd::shared::{LANES, TAPS};
use crate::isa::{Level, Work};

type Lanes = [f32; LANES];

/// Adds lane by lane.
#[inline(always)]
fn add(a: Lanes, b: Lanes) -> Lanes {
    std::array::from_fn(|i| a[i] + b[i])
}

/// Subtracts lane by lane.
#[inline(always)]
fn sub(a: Lanes, b: Lanes) -> Lanes {
    std::array::from_fn(|i| a[i] - b[i])
}

/// Transforms a line of three taps into four values.
#[inline(always)]
fn transform_taps(a: Lanes, b: Lanes, c: Lanes) -> (Lanes, Lanes, Lanes, Lanes) {
    let (ends, middle) = (add(a, c).map(|x| x * 0.5), b.map(|x| x * 0.5));
    (a, add(ends, middle), sub(ends, middle), c)
}

/// Transforms a line of four sums into three sums, for the gradient of the filter.
#[inline(always)]
fn transform_sums(a: Lanes, b: Lanes, c: Lanes, d: Lanes) -> (Lanes, Lanes, Lanes) {
    let half = |x: Lanes| x.map(|x| x * 0.5);
    let (sum, difference) = (half(add(b, c)), half(sub(b, c)));
    (add(a, sum), difference, add(sum, d))
}

/// # Safety
/// [`LANES`] elements from `from` on are valid for reads.
#[inline(always)]
unsafe fn load(from: *const f32) -> Lanes {
    // SAFETY: the caller's contract.
    unsafe { from.cast::<Lanes>().read_unaligned() }
}

/// # Safety
/// [`LANES`] elements from `to` on are valid for writes.
#[inline(always)]
unsafe fn store(to: *mut f32, value: Lanes) {
    // SAFETY: the caller's contract.
    unsafe { to.cast::<Lanes>().write_unaligned(value) };
}

/// Stores even and odd positions alternately.
///
/// # Safety
/// Twice [`LANES`] elements from `to` on are valid for writes.
#[inline(always)]
unsafe fn interleave((even, odd): (Lanes, Lanes), to: *mut f32) {
    let interleaved: [f32; 2 * LANES] =
        std::array::from_fn(|i| if i % 2 == 0 { even[i / 2] } else { odd[i / 2] });
    // SAFETY: the caller's contract.
    unsafe { to.cast::<[f32; 2 * LANES]>().write_unaligned(interleaved) };
}

/// Transform of packed weights. Writes up to [`LANES`] elements after the last channel.
pub(super) struct WeightTransform {
    pub(super) from: *const f32,
    pub(super) channels: usize,
    pub(super) lines: usize,
    pub(super) reversed: bool,
    pub(super) to: *mut f32,
    /// Elements from point to point.
    pub(super) step: usize,
}

impl Work for WeightTransform {
    type Out = ();
    #[inline(always)]
    fn work<L: Level>(self) {
        let WeightTransform { from, channels, lines, reversed, to, step } = self;
        for channel in 0..channels {
            for first in (0..lines).step_by(LANES) {
                // If lines are no multiple of the lanes, the last lanes overlap the lanes before them, or reach into
                // the next channel, which is written later.
                let first = first.min(lines.saturating_sub(LANES));
                // SAFETY: the caller has packed these weights, and has capacity for their transforms.
                unsafe {
                    let tap = |i: usize| {
                        let tap = if reversed { TAPS - 1 - i } else { i };
                        load(from.add((channel * TAPS + tap) * lines + first))
                    };
                    let to = to.add(channel * lines + first);
                    let line = |i: usize| transform_taps(tap(3 * i), tap(3 * i + 1), tap(3 * i + 2));
                    let (top, middle, bottom) = (line(0), line(1), line(2));
                    let column = |j: usize, a: Lanes, b: Lanes, c: Lanes| {
                        let (a, b, c, d) = transform_taps(a, b, c);
                        store(to.add(j * step), a);
                        store(to.add((4 + j) * step), b);
                        store(to.add((8 + j) * step), c);
                        store(to.add((12 + j) * step), d);
                    };
                    column(0, top.0, middle.0, bottom.0);
                    column(1, top.1, middle.1, bottom.1);
                    column(2, top.2, middle.2, bottom.2);
                    column(3, top.3, middle.3, bottom.3);
                }
            }
        }
    }
}

/// Images of a tensor, covered by tiles.
#[derive(Clone, Copy, Debug)]
pub(super) struct Images {
    /// Rows and columns of an image, and of the padding before it.
    pub(super) size: [usize; 2],
    pub(super) before: [isize; 2],
    /// Rows and columns of tiles.
    pub(super) grid: [usize; 2],
    /// Number of channels of an image.
    pub(super) channels: usize,
}

/// Number of lines of working memory for [`Tiles`] and [`Gradients`].
const WORKING_LINES: usize = 18;

impl Images {
    /// Returns the capacity of a line with an element for each tile.
    fn line_len(&self) -> usize {
        (self.grid[1] + 1 + LANES).next_multiple_of(16)
    }

    /// Returns the elements of working memory for [`Tiles`] and [`Gradients`].
    pub(super) fn working_elements(&self) -> usize {
        WORKING_LINES * self.line_len()
    }

    /// Returns the plane of a channel, and the row of tiles in that plane, for a row of tiles that is counted over all
    /// images.
    #[inline(always)]
    fn plane(&self, from: *const f32, channel: usize, row: usize) -> (*const f32, usize) {
        let plane = row / self.grid[0] * self.channels + channel;
        (from.wrapping_add(plane * self.size[0] * self.size[1]), row % self.grid[0])
    }

    /// Separates a line of a plane, with its padding, into even and odd positions: one more of each than there are
    /// tiles.
    ///
    /// # Safety
    /// `plane` is valid for reads of a plane. `even` and `odd` are valid for writes of one element more than there are
    /// tiles.
    #[inline(always)]
    unsafe fn split_line(&self, plane: *const f32, line: usize, even: *mut f32, odd: *mut f32) {
        let &Images { size: [height, width], before: [top, left], grid, .. } = self;
        let column_count = grid[1] + 1;
        // SAFETY: the caller's contract, and a line has `width` elements.
        unsafe {
            even.write_bytes(0, column_count);
            odd.write_bytes(0, column_count);
            let y = line as isize - top;
            if y < 0 || y >= height as isize {
                return;
            }
            let first = (-left).max(0);
            let end = (width as isize).min(2 * column_count as isize - left);
            let from = plane.wrapping_offset(y * width as isize + first);
            let count = (end - first).max(0) as usize;
            let column = (first + left) as usize;
            let (a, b) = if column.is_multiple_of(2) {
                (even.wrapping_add(column / 2), odd.wrapping_add(column / 2))
            } else {
                (odd.wrapping_add(column / 2), even.wrapping_add(column / 2 + 1))
            };
            let pairs = count / 2;
            let full_pairs = pairs - pairs % LANES;
            for i in (0..full_pairs).step_by(LANES) {
                let both = from.add(2 * i).cast::<[f32; 2 * LANES]>().read_unaligned();
                store(a.add(i), std::array::from_fn(|i| both[2 * i]));
                store(b.add(i), std::array::from_fn(|i| both[2 * i + 1]));
            }
            for i in full_pairs..pairs {
                a.add(i).write(from.add(2 * i).read_unaligned());
                b.add(i).write(from.add(2 * i + 1).read_unaligned());
            }
            if !count.is_multiple_of(2) {
                a.add(pairs).write(from.add(count - 1).read_unaligned());
            }
        }
    }
}

/// Transform of the elements of some channels that a strip of rows of tiles sees.
pub(super) struct TileTransform {
    pub(super) images: Images,
    pub(super) from: *const f32,
    /// Rows of tiles, counted over all images, and channels: the first one and the end of each.
    pub(super) strip: (usize, usize),
    pub(super) channels: (usize, usize),
    /// Working memory: four transformed lines of the image, with four values for each tile; then the even positions of
    /// a line, and the odd ones.
    pub(super) lines: *mut f32,
    /// Destination of the first channel, and the steps from point to point and from channel to channel. Up to [`LANES`]
    /// elements after the last tile of a channel are overwritten.
    pub(super) to: *mut f32,
    pub(super) point: usize,
    pub(super) pitch: usize,
}

impl TileTransform {
    /// Transforms line `line` of an image's plane, with its padding.
    #[inline(always)]
    unsafe fn line(&self, plane: *const f32, line: usize) {
        let half = self.images.line_len();
        let even = self.lines.wrapping_add(16 * half);
        let odd = even.wrapping_add(half);
        let to = self.lines.wrapping_add(line % 4 * 4 * half);
        // SAFETY: lines have capacity for the lanes of the last tiles.
        unsafe {
            self.images.split_line(plane, line, even, odd);
            for x in (0..self.images.grid[1]).step_by(LANES) {
                let (a, b) = (load(even.add(x)), load(odd.add(x)));
                let (c, d) = (load(even.add(x + 1)), load(odd.add(x + 1)));
                store(to.add(x), sub(a, c));
                store(to.add(half + x), add(b, c));
                store(to.add(2 * half + x), sub(c, b));
                store(to.add(3 * half + x), sub(b, d));
            }
        }
    }
}

impl Work for TileTransform {
    type Out = ();
    #[inline(always)]
    fn work<L: Level>(self) {
        let TileTransform { images, strip, channels, lines, point, pitch, .. } = self;
        let (half, wide) = (images.line_len(), images.grid[1]);
        for channel in channels.0..channels.1 {
            for row in strip.0..strip.1 {
                let (plane, y) = images.plane(self.from, channel, row);
                // The first two lines are the last two lines of the row of tiles before.
                let fresh = if y == 0 || row == strip.0 { 0 } else { 2 };
                let to = self.to.wrapping_add((channel - channels.0) * pitch + (row - strip.0) * wide);
                // SAFETY: the planes belong to the tensor, and lines and tiles have capacity for the last lanes.
                unsafe {
                    (fresh..4).for_each(|line| self.line(plane, 2 * y + line));
                    for x in (0..wide).step_by(LANES) {
                        for j in 0..4 {
                            let load_line =
                                |line: usize| load(lines.add(((2 * y + line) % 4 * 4 + j) * half + x));
                            let to = |i: usize| to.add((4 * i + j) * point + x);
                            let (a, b, c, d) = (load_line(0), load_line(1), load_line(2), load_line(3));
                            store(to(0), sub(a, c));
                            store(to(1), add(b, c));
                            store(to(2), sub(c, b));
                            store(to(3), sub(b, d));
                        }
                    }
                }
            }
        }
    }
}

/// Transform of the gradients of a strip of rows of tiles, for some channels, for the gradient of the filter.
pub(super) struct GradientTransform {
    pub(super) images: Images,
    pub(super) from: *const f32,
    pub(super) strip: (usize, usize),
    pub(super) channels: (usize, usize),
    /// The even and the odd positions of two lines.
    pub(super) lines: *mut f32,
    /// As the fields of [`Tiles`].
    pub(super) to: *mut f32,
    pub(super) point: usize,
    pub(super) pitch: usize,
}

impl Work for GradientTransform {
    type Out = ();
    #[inline(always)]
    fn work<L: Level>(self) {
        let GradientTransform { images, strip, channels, lines, point, pitch, .. } = self;
        let (half, wide) = (images.line_len(), images.grid[1]);
        let part = |i: usize| lines.wrapping_add(i * half);
        for channel in channels.0..channels.1 {
            for row in strip.0..strip.1 {
                let (plane, y) = images.plane(self.from, channel, row);
                let to = self.to.wrapping_add((channel - channels.0) * pitch + (row - strip.0) * wide);
                // SAFETY: the planes belong to the tensor, and lines and tiles have capacity for the last lanes.
                unsafe {
                    images.split_line(plane, 2 * y, part(0), part(1));
                    images.split_line(plane, 2 * y + 1, part(2), part(3));
                    for x in (0..wide).step_by(LANES) {
                        let column = |j: usize, upper: Lanes, lower: Lanes| {
                            let to = |i: usize| to.add((4 * i + j) * point + x);
                            store(to(0), upper);
                            store(to(1), add(upper, lower));
                            store(to(2), sub(upper, lower));
                            store(to(3), lower.map(|x| -x));
                        };
                        let (a, b) = (load(part(0).add(x)), load(part(1).add(x)));
                        let (c, d) = (load(part(2).add(x)), load(part(3).add(x)));
                        column(0, a, c);
                        column(1, add(a, b), add(c, d));
                        column(2, sub(a, b), sub(c, d));
                        column(3, b.map(|x| -x), d.map(|x| -x));
                    }
                }
            }
        }
    }
}

/// Transform of sums over tiles into rows of a filter's gradient.
pub(super) struct FilterPlaneTransform {
    /// For each row the sums of all channels; the steps from point to point, and from row to row.
    pub(super) from: *const f32,
    pub(super) point: usize,
    pub(super) pitch: usize,
    pub(super) rows: usize,
    pub(super) channels: usize,
    /// [`TAPS`] elements of each channel, and the step from row to row. Up to [`TAPS`] times [`LANES`] elements after
    /// the last row are overwritten.
    pub(super) to: *mut f32,
    pub(super) line: usize,
}

impl Work for FilterPlaneTransform {
    type Out = ();
    #[inline(always)]
    fn work<L: Level>(self) {
        let FilterPlaneTransform { from, point, pitch, rows, channels, to, line } = self;
        let mut planes = [[0f32; LANES]; TAPS];
        for row in 0..rows {
            for first in (0..channels).step_by(LANES) {
                let from = from.wrapping_add(row * pitch + first);
                let to = to.wrapping_add(row * line + first * TAPS);
                // SAFETY: sums and rows have capacity for the last lanes (the caller's contract).
                unsafe {
                    let sums = |j: usize| {
                        let sum = |i: usize| load(from.add((4 * i + j) * point));
                        transform_sums(sum(0), sum(1), sum(2), sum(3))
                    };
                    let (a, b, c, d) = (sums(0), sums(1), sums(2), sums(3));
                    (planes[0], planes[1], planes[2]) = transform_sums(a.0, b.0, c.0, d.0);
                    (planes[3], planes[4], planes[5]) = transform_sums(a.1, b.1, c.1, d.1);
                    (planes[6], planes[7], planes[8]) = transform_sums(a.2, b.2, c.2, d.2);
                    L::transpose_8x8(planes.as_ptr().cast(), LANES as isize, to, TAPS);
                    for (i, &last) in planes[TAPS - 1].iter().enumerate() {
                        to.add(i * TAPS + TAPS - 1).write(last);
                    }
                }
            }
        }
    }
}

/// Transform of sums into squares of the result.
pub(super) struct ResultTransform {
    pub(super) from: *const f32,
    /// Elements from point to point, and from row to row.
    pub(super) step: usize,
    pub(super) pitch: usize,
    pub(super) rows: usize,
    pub(super) strip: (usize, usize),
    pub(super) grid: [usize; 2],
    pub(super) result: [usize; 2],
    pub(super) to: *mut f32,
    /// Elements from row to row of the result.
    pub(super) line: usize,
}

impl Work for ResultTransform {
    type Out = ();
    #[inline(always)]
    fn work<L: Level>(self) {
        let ResultTransform {
            from,
            step,
            pitch,
            rows,
            strip,
            grid: [tall, wide],
            result: [height, width],
            to,
            line,
        } = self;
        let row_offset = |row: usize| row / tall * height + row % tall * 2;
        for i in 0..rows {
            for row in strip.0..strip.1 {
                let from = from.wrapping_add(i * pitch + (row - strip.0) * wide);
                let to = to.wrapping_add(i * line + (row_offset(row) - row_offset(strip.0)) * width);
                let both = row % tall * 2 + 1 < height;
                // Elements that are stored after the end of a line are overwritten later: lines are stored in order,
                // and the lanes of two lines from the last to the first.
                for x in (0..wide.div_ceil(LANES)).rev().map(|x| x * LANES) {
                    // SAFETY: the layout has capacity for the sums, and for the results of the last lanes.
                    unsafe {
                        let sums = |i: usize| {
                            let sum = |j: usize| load(from.add((4 * i + j) * step + x));
                            let (a, b, c, d) = (sum(0), sum(1), sum(2), sum(3));
                            (add(add(a, b), c), sub(sub(b, c), d))
                        };
                        let (a, b, c, d) = (sums(0), sums(1), sums(2), sums(3));
                        let upper = (add(add(a.0, b.0), c.0), add(add(a.1, b.1), c.1));
                        let lower = (sub(sub(b.0, c.0), d.0), sub(sub(b.1, c.1), d.1));
                        interleave(upper, to.add(2 * x));
                        if both {
                            interleave(lower, to.add(width + 2 * x));
                        }
                    }
                }
            }
        }
    }
}
