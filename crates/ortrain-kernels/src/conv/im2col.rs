//! Tensors as sliding windows see them.
//!
//! A window at a position covers, tap by tap, elements of a plane. Positions are counted linearly over images and axes,
//! the innermost axis last. The elements under one tap at consecutive positions are a row of the matrix product. To
//! read such rows as runs, the part of a plane that some positions see is first copied into a *strip*. The strip has
//! the padding as zeros, and elements of the compute type. If the stride is larger than one, elements are sorted, so
//! that consecutive positions see adjacent elements under a tap. The offset of an element in the strip is then the sum
//! of an offset of the position and an offset of the tap.

use ortrain_expr::{ConvPass, ConvShape, SlidingAxis};

/// One axis of positions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Axis {
    /// Number of positions.
    pub(super) count: usize,
    /// Number of elements of the tensor along the axis.
    pub(super) source: usize,
    /// Number of elements from one position to the next.
    pub(super) step: usize,
    /// Position `q` of phase `r` is element `q * spread + r` of the result.
    pub(super) spread: usize,
    /// Number of elements of the result along the axis.
    pub(super) result: usize,
    phases: Vec<AxisPhase>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct AxisPhase {
    phase_index: usize,
    /// For each tap: its offset in the filter, and its element of the tensor at position zero.
    taps: Vec<(usize, isize)>,
}

/// The positions that see the tensor through the same taps.
#[derive(Clone, Debug)]
pub(super) struct Phase {
    /// Position within the spread of the outer axes; then of rows and of columns.
    pub(super) outer: Vec<usize>,
    pub(super) row: usize,
    pub(super) col: usize,
    /// Elements of the filter's plane.
    pub(super) taps: Vec<usize>,
    /// Offsets of the taps: in a strip, or in the tensor if it is read in place.
    pub(super) offsets: Vec<isize>,
    /// Offsets along the axes.
    along: Vec<Vec<isize>>,
}

impl Phase {
    /// Returns the row distance from a position to the elements under a tap, in elements.
    pub(super) fn row_offset(&self, tap: usize) -> isize {
        let along = &self.along[tap];
        along[along.len() - 2]
    }
}

/// A tensor `[batch, channels, axes..]` seen through windows.
#[derive(Clone, Debug)]
pub(super) struct Patches {
    /// Number of elements of a plane, and of an image with all its channels.
    pub(super) plane: usize,
    pub(super) image: usize,
    pub(super) batch: usize,
    /// All axes but the last two.
    pub(super) outer: Vec<Axis>,
    pub(super) rows: Axis,
    pub(super) cols: Axis,
    pub(super) phases: Vec<Phase>,
    /// True if every position is one element, in order, so that no copy is needed.
    pub(super) is_aligned: bool,
    /// Layout of strips.
    pub(super) strip: Strip,
}

/// Layout of a strip: for each piece (see [`Patches::pieces`]) and each combination of offsets along the outer axes,
/// rows of elements. The phases of rows are interleaved, and the phases of columns follow each other in a row. In a
/// *planar* strip each phase of both is a separate plane, with adjacent rows.
#[derive(Clone, Debug, Default)]
pub(super) struct Strip {
    /// True if a range of positions is inside of one row.
    is_split_by_rows: bool,
    outer: Vec<Vec<isize>>,
    row: Remainders,
    col: Remainders,
    /// Elements from a row to the next row of its phase, between row phases, between column phases, and between
    /// combinations.
    pub(super) row_step: usize,
    row_phase: usize,
    col_phase: usize,
    plane: usize,
    /// Number of elements for one channel.
    pub(super) elements: usize,
    /// Source of the elements of each column phase, if all positions of a row are seen.
    runs: Vec<Run>,
}

/// Offsets along an axis, grouped by their remainders modulo the step.
#[derive(Clone, Debug, Default)]
struct Remainders {
    remainders: Vec<usize>,
    /// Smallest quotient, and difference between the largest and the smallest quotient.
    low: isize,
    span: usize,
}

impl Remainders {
    fn new(step: usize, offsets: impl Iterator<Item = isize> + Clone) -> Remainders {
        let step = step as isize;
        let mut remainders: Vec<usize> =
            offsets.clone().map(|offset| offset.rem_euclid(step) as usize).collect();
        remainders.sort_unstable();
        remainders.dedup();
        let quotients = offsets.map(|offset| offset.div_euclid(step));
        let low = quotients.clone().min().unwrap_or(0);
        let span = (quotients.max().unwrap_or(0) - low) as usize;
        Remainders { remainders, low, span }
    }

    fn find(&self, step: usize, offset: isize) -> (usize, usize) {
        let step = step as isize;
        let remainder = offset.rem_euclid(step) as usize;
        let index = self.remainders.iter().position(|&other| other == remainder);
        (index.unwrap_or(0), (offset.div_euclid(step) - self.low) as usize)
    }
}

/// A row of a strip, or a part of it: `zeros` zeros, then `count` elements from `first` on, then zeros again.
#[derive(Clone, Copy, Debug)]
pub(super) struct Run {
    pub(super) zeros: usize,
    pub(super) count: usize,
    pub(super) first: usize,
}

/// Rows of a strip that are one run each, with constant steps from row to row in the strip and in the channel.
#[derive(Clone, Copy, Debug)]
pub(super) struct Band {
    pub(super) rows: usize,
    pub(super) count: usize,
    /// Start of the first run in the strip and in a channel, and the steps from row to row.
    pub(super) to: usize,
    pub(super) to_step: usize,
    pub(super) from: usize,
    pub(super) from_step: usize,
}

/// Adjacent elements that are copied together into one row of a product. `from` is relative to the offsets of a channel
/// and a tap, and `to` is relative to the offset of the row.
#[derive(Clone, Copy, Debug)]
pub(super) struct Segment {
    pub(super) from: isize,
    pub(super) to: u32,
    pub(super) len: u32,
}

/// Consecutive rows of positions of one image with the same outer position.
#[derive(Clone, Copy, Debug)]
pub(super) struct Piece {
    pub(super) image: usize,
    pub(super) outer: usize,
    pub(super) row: usize,
    pub(super) rows: usize,
}

/// Maximum number of phases. Convolutions with more phases use the fallback.
const MAX_PHASES: usize = 256;

/// Number of zeros and elements after the end that copies of whole vectors may access.
pub(super) const SLACK: usize = 32;

impl Axis {
    /// Returns the axis of a missing dimension: one position with one tap.
    fn single_position() -> Axis {
        let phases = vec![AxisPhase { phase_index: 0, taps: vec![(0, 0)] }];
        Axis { count: 1, source: 1, step: 1, spread: 1, result: 1, phases }
    }

    /// Returns the axis of the input, for the output or the gradient of the filter. Taps are `unit` elements of the
    /// filter apart.
    fn forward(axis: &SlidingAxis, unit: usize) -> Axis {
        let offset = |k: usize| (k * axis.dilation) as isize - axis.padding_before;
        let taps = (0..axis.kernel).map(|k| (k * unit, offset(k))).collect();
        Axis {
            count: axis.output,
            source: axis.input,
            step: if axis.output > 1 { axis.stride } else { 1 },
            spread: 1,
            result: axis.output,
            phases: vec![AxisPhase { phase_index: 0, taps }],
        }
        .without_dead_taps()
    }

    /// Returns the axis of the output's gradient, for the gradient of the input.
    fn backward(axis: &SlidingAxis, unit: usize) -> Axis {
        let stride = axis.stride as isize;
        let mut phases: Vec<AxisPhase> = Vec::new();
        for k in 0..axis.kernel {
            let shift = axis.padding_before - (k * axis.dilation) as isize;
            let remainder = (-shift).rem_euclid(stride);
            let tap = (k * unit, (remainder + shift) / stride);
            let phase_index = remainder as usize;
            if phase_index < axis.input {
                match phases.iter_mut().find(|phase| phase.phase_index == phase_index) {
                    Some(phase) => phase.taps.push(tap),
                    None => phases.push(AxisPhase { phase_index, taps: vec![tap] }),
                }
            }
        }
        phases.sort_by_key(|phase| phase.phase_index);
        let spread = if axis.input > 1 { axis.stride } else { 1 };
        Axis {
            count: axis.input.div_ceil(axis.stride),
            source: axis.output,
            step: 1,
            spread,
            result: axis.input,
            phases,
        }
        .without_dead_taps()
    }

    /// Drops taps that see only padding.
    fn without_dead_taps(mut self) -> Axis {
        let Axis { count, source, step, .. } = self;
        let reaches = |offset: isize| {
            let first = if offset < 0 { offset.unsigned_abs().div_ceil(step) } else { 0 };
            first < count && ((first * step) as isize + offset) < source as isize
        };
        for phase in &mut self.phases {
            phase.taps.retain(|&(_, offset)| reaches(offset));
        }
        self.phases.retain(|phase| !phase.taps.is_empty());
        self
    }

    /// Returns true if each position sees exactly the element of the same index.
    fn is_aligned(&self) -> bool {
        let [phase] = self.phases.as_slice() else { return false };
        let is_single = matches!(phase.taps.as_slice(), [(_, 0)]) && phase.phase_index == 0;
        is_single
            && self.step == 1
            && self.spread == 1
            && self.count == self.source
            && self.count == self.result
    }

    /// Merges both axes, if windows cover the whole inner axis, element by element.
    fn merge_inner(&self, inner: &Axis) -> Option<Axis> {
        let ([outer_phase], [inner_phase]) = (self.phases.as_slice(), inner.phases.as_slice()) else {
            return None;
        };
        let plain = self.step == 1 && self.spread == 1 && outer_phase.phase_index == 0;
        if !plain || !inner.is_aligned() {
            return None;
        }
        let tap = inner_phase.taps[0].0;
        let taps = outer_phase.taps.iter();
        let taps = taps.map(|&(outer, offset)| (outer + tap, offset * inner.count as isize)).collect();
        Some(Axis {
            count: self.count * inner.count,
            source: self.source * inner.source,
            step: 1,
            spread: 1,
            result: self.result * inner.result,
            phases: vec![AxisPhase { phase_index: 0, taps }],
        })
    }
}

impl Patches {
    /// Describes the tensor that a pass sees through windows: the input, or the gradient of the output. Returns `None`
    /// if the stride is so large that most elements of the result have no taps, or taps of their own. `in_place`: the
    /// tensor may be read directly.
    pub(super) fn new(shape: &ConvShape, in_place: bool) -> Option<Patches> {
        let is_gradient = shape.pass == ConvPass::InputGradient;
        // From the innermost axis on, so that each axis may merge with the axis inside of it.
        let mut axes: Vec<Axis> = Vec::new();
        let mut unit = 1;
        for axis in shape.axes.iter().rev() {
            let new_axis = if is_gradient { Axis::backward(axis, unit) } else { Axis::forward(axis, unit) };
            unit *= axis.kernel;
            match axes.last().and_then(|inner| new_axis.merge_inner(inner)) {
                Some(merged) => *axes.last_mut()? = merged,
                None => axes.push(new_axis),
            }
        }
        let product = |f: fn(&Axis) -> usize| axes.iter().try_fold(1usize, |n, axis| n.checked_mul(f(axis)));
        let is_small = |count: Option<usize>| count.is_some_and(|count| count <= MAX_PHASES);
        if !is_small(product(|axis| axis.phases.len())) || !is_small(product(|axis| axis.spread)) {
            return None;
        }
        let aligned = in_place && axes.len() == 1 && axes[0].is_aligned();
        let channels = if is_gradient { shape.channels_out } else { shape.channels_in };
        let plane: usize = axes.iter().map(|axis| axis.source).product();
        let mut axes = axes.into_iter();
        let cols = axes.next().unwrap_or_else(Axis::single_position);
        let mut rows = axes.next().unwrap_or_else(Axis::single_position);
        let mut outer: Vec<Axis> = axes.rev().collect();
        let offsets = |axis: &Axis| -> Vec<isize> {
            axis.phases.iter().flat_map(|phase| phase.taps.iter().map(|tap| tap.1)).collect()
        };
        // Rows that are far apart are copied for each tap, without the rows between them.
        let slots = Remainders::new(rows.step, offsets(&rows).into_iter());
        if slots.span > 32 && slots.span > 2 * offsets(&rows).len() {
            outer.push(std::mem::replace(&mut rows, Axis::single_position()));
        }
        let mut phases = vec![(Vec::new(), vec![(0usize, Vec::new())])];
        for axis in outer.iter().chain([&rows, &cols]) {
            phases = phases
                .iter()
                .flat_map(|(phase_indices, taps)| {
                    axis.phases.iter().map(move |phase| {
                        let indices = [phase_indices.as_slice(), &[phase.phase_index]].concat();
                        let taps = taps.iter().flat_map(|(tap, along)| {
                            let with = move |&(unit, offset): &(usize, isize)| {
                                (tap + unit, [along.as_slice(), &[offset]].concat())
                            };
                            phase.taps.iter().map(with)
                        });
                        (indices, taps.collect())
                    })
                })
                .collect();
        }
        let phases = phases.into_iter().map(|(mut indices, taps): (Vec<usize>, Vec<(usize, Vec<isize>)>)| {
            let (col, row) = (indices.pop().unwrap_or(0), indices.pop().unwrap_or(0));
            let (taps, along) = taps.into_iter().unzip();
            Phase { outer: indices, row, col, taps, offsets: Vec::new(), along }
        });
        Some(Patches {
            plane,
            image: shape.groups * channels * plane,
            batch: shape.batch,
            phases: phases.collect(),
            outer,
            rows,
            cols,
            is_aligned: aligned,
            strip: Strip::default(),
        })
    }

    /// Returns the number of positions of an image.
    pub(super) fn positions(&self) -> usize {
        self.outer.iter().map(|axis| axis.count).product::<usize>() * self.rows.count * self.cols.count
    }

    /// Chooses the layout of strips for ranges of at most `max_columns` positions. `split`: each range is inside of one row.
    /// `planar`: each range is inside of one image, and there are no outer axes.
    pub(super) fn plan_strip(&mut self, max_columns: usize, split: bool, planar: bool) {
        let rank = self.outer.len();
        let offsets = |axis: usize| {
            self.phases.iter().flat_map(move |phase| phase.along.iter().map(move |along| along[axis]))
        };
        let row = Remainders::new(self.rows.step, offsets(rank));
        let col = Remainders::new(self.cols.step, offsets(rank + 1));
        let mut outer: Vec<Vec<isize>> = Vec::new();
        if !self.is_aligned {
            let every =
                self.phases.iter().flat_map(|phase| phase.along.iter().map(|along| along[..rank].to_vec()));
            outer.extend(every);
            outer.sort_unstable();
            outer.dedup();
        }
        let columns = if split { max_columns.min(self.cols.count) } else { self.cols.count };
        let width = columns + col.span;
        let row_count = self.batch * (self.positions() / self.cols.count.max(1));
        let touched =
            if split { 1 } else { row_count.min(max_columns.saturating_sub(1) / self.cols.count.max(1) + 2) };
        let tall = touched.min(self.rows.count.max(1));
        let pieces = touched.min(touched.saturating_sub(1) / self.rows.count.max(1) + 2);
        let phases = row.remainders.len() * col.remainders.len();
        let rows = |positions: usize, pieces: usize| (positions + pieces * row.span) * phases * width;
        let plane = rows(tall, 1);
        let elements = if outer.len() == 1 { rows(touched, pieces) } else { pieces * outer.len() * plane };
        let (row_step, row_phase, col_phase) = if planar {
            let high = tall + row.span;
            (width, col.remainders.len() * high * width, high * width)
        } else {
            (phases * width, col.remainders.len() * width, width)
        };
        for phase in &mut self.phases {
            let offset = |along: &Vec<isize>| {
                if self.is_aligned {
                    return 0;
                }
                let combination = outer.binary_search_by(|other| other[..].cmp(&along[..rank])).unwrap_or(0);
                let (row_index, row_at) = row.find(self.rows.step, along[rank]);
                let (col_index, col_at) = col.find(self.cols.step, along[rank + 1]);
                let row = row_at * row_step + row_index * row_phase;
                (combination * plane + row + col_index * col_phase + col_at) as isize
            };
            phase.offsets = phase.along.iter().map(offset).collect();
        }
        let elements = if self.is_aligned { 0 } else { elements + SLACK };
        self.strip = Strip {
            is_split_by_rows: split,
            outer,
            row,
            col,
            row_step,
            row_phase,
            col_phase,
            plane,
            elements,
            runs: Vec::new(),
        };
        if !split {
            let run = |&remainder: &usize| self.column_run(remainder, 0, self.cols.count);
            self.strip.runs = self.strip.col.remainders.iter().map(run).collect();
        }
    }

    /// Returns the source of a column phase, for `count` positions from column `x` on.
    fn column_run(&self, remainder: usize, x: usize, count: usize) -> Run {
        let step = self.cols.step as isize;
        let begin = (x as isize + self.strip.col.low) * step + remainder as isize;
        let total = count + self.strip.col.span;
        let zeros = if begin < 0 { begin.unsigned_abs().div_ceil(self.cols.step).min(total) } else { 0 };
        let first = begin + zeros as isize * step;
        let left = self.cols.source as isize - first;
        let copied = if left > 0 { (left as usize).div_ceil(self.cols.step).min(total - zeros) } else { 0 };
        Run { zeros, count: copied, first: first.max(0) as usize }
    }

    /// Calls `f` for each piece of a range of positions.
    #[inline(always)]
    pub(super) fn for_each_piece(&self, begin: usize, end: usize, mut f: impl FnMut(Piece)) {
        let (high, wide) = (self.rows.count, self.cols.count);
        let outer: usize = self.outer.iter().map(|axis| axis.count).product();
        let (mut row, last) = (begin / wide, (end - 1) / wide);
        while row <= last {
            let rows = (high - row % high).min(last + 1 - row);
            f(Piece { image: row / high / outer, outer: row / high % outer, row: row % high, rows });
            row += rows;
        }
    }

    /// Returns the maximum number of segments of a range, divided into at most `max_panels` panels.
    pub(super) fn max_segments(&self, max_panels: usize, panel: usize) -> usize {
        max_panels / self.cols.count.max(1) + 2 + max_panels.div_ceil(panel)
    }

    /// Calls `f` for the segments of the positions `begin..end`, in order. Segments are divided into panels of `panel`
    /// positions, with `pitch` elements from panel to panel.
    pub(super) fn for_each_segment(
        &self,
        (begin, end): (usize, usize),
        panel: usize,
        pitch: usize,
        mut f: impl FnMut(Segment),
    ) {
        let mut at = 0;
        let mut add_segment = |mut from: isize, mut len: usize| {
            while len > 0 {
                let now = len.min(panel - at % panel);
                f(Segment { from, to: (at / panel * pitch + at % panel) as u32, len: now as u32 });
                at += now;
                from += now as isize;
                len -= now;
            }
        };
        let wide = self.cols.count;
        if self.is_aligned {
            let mut index = begin;
            while index < end {
                let len = (wide - index % wide).min(end - index);
                add_segment((index / wide * self.image + index % wide) as isize, len);
                index += len;
            }
            return;
        }
        let Strip { is_split_by_rows: split, ref outer, ref row, row_step, plane, .. } = self.strip;
        let start = if split { begin % wide } else { 0 };
        let (mut base, mut index) = (0, begin);
        self.for_each_piece(begin, end, |piece| {
            for y in 0..piece.rows {
                let len = (wide - index % wide).min(end - index);
                add_segment((base + y * row_step + index % wide - start) as isize, len);
                index += len;
            }
            base += if outer.len() == 1 { (piece.rows + row.span) * row_step } else { outer.len() * plane };
        });
    }

    /// Calls `f(to, from)` for each row of the strip of the positions `begin..end` that is not padding: its start in
    /// the strip, and its start in a channel.
    #[inline(always)]
    pub(super) fn for_each_strip_row(&self, begin: usize, end: usize, mut f: impl FnMut(usize, usize)) {
        let Strip { ref outer, ref row, row_step, row_phase, plane, .. } = self.strip;
        let mut base = 0;
        self.for_each_piece(begin, end, |piece| {
            for offsets in outer {
                if let Some(index) = self.outer_index(piece.outer, offsets) {
                    let from = piece.image * self.image + index * self.rows.source * self.cols.source;
                    // In memory order.
                    for quotient in 0..piece.rows + row.span {
                        let first = ((piece.row + quotient) as isize + row.low) * self.rows.step as isize;
                        for (i, &remainder) in row.remainders.iter().enumerate() {
                            let y = first + remainder as isize;
                            if y >= 0 && (y as usize) < self.rows.source {
                                let to = base + quotient * row_step + i * row_phase;
                                f(to, from + y as usize * self.cols.source);
                            }
                        }
                    }
                }
                base += if outer.len() == 1 { (piece.rows + row.span) * row_step } else { plane };
            }
        });
    }

    /// Returns the band with the elements of [`Patches::for_each_strip_row`] and [`Patches::for_each_run`], if there is one:
    /// positions of one image, with adjacent columns.
    pub(super) fn band(&self, begin: usize, end: usize) -> Option<Band> {
        let (wide, high) = (self.cols.count, self.rows.count);
        let Strip { is_split_by_rows: split, ref row, row_step, ref runs, .. } = self.strip;
        let ([run], &[remainder]) = (runs.as_slice(), row.remainders.as_slice()) else { return None };
        let (first, last) = (begin / wide, (end - 1) / wide);
        if split || !self.outer.is_empty() || self.cols.step != 1 || first / high != last / high {
            return None;
        }
        let step = self.rows.step;
        let y = ((first % high) as isize + row.low) * step as isize + remainder as isize;
        let above = if y < 0 { y.unsigned_abs().div_ceil(step) } else { 0 };
        let y = (y + (above * step) as isize) as usize;
        let inside = self.rows.source.saturating_sub(y).div_ceil(step);
        Some(Band {
            rows: inside.min((last - first + 1 + row.span).saturating_sub(above)),
            count: run.count,
            to: above * row_step + run.zeros,
            to_step: row_step,
            from: first / high * self.image + y * self.cols.source + run.first,
            from_step: step * self.cols.source,
        })
    }

    /// Returns the runs of the even and of the odd columns, if the column step is two and the odd run begins one
    /// element later. Each has its start in a row of the strip, and its elements.
    pub(super) fn stride_two_runs(&self) -> Option<[(usize, Run); 2]> {
        let &[even, odd] = self.strip.runs.as_slice() else { return None };
        let next = self.cols.step == 2 && odd.first == even.first + 1;
        next.then_some([(even.zeros, even), (self.strip.col_phase + odd.zeros, odd)])
    }

    /// Returns the linear index of the outer element under a tap at an outer position.
    fn outer_index(&self, mut position: usize, offsets: &[isize]) -> Option<usize> {
        let (mut index, mut unit) = (0, 1);
        for (axis, &offset) in self.outer.iter().zip(offsets).rev() {
            let at = (position % axis.count * axis.step) as isize + offset;
            index += unit * usize::try_from(at).ok().filter(|&at| at < axis.source)?;
            unit *= axis.source;
            position /= axis.count;
        }
        Some(index)
    }

    /// Calls `f(spread, index)` for each outer element of the result at an outer position: its linear index within the
    /// spread, and its linear index in the result.
    #[inline(always)]
    pub(super) fn for_each_outer_index(&self, position: usize, mut f: impl FnMut(usize, usize)) {
        let axes = &self.outer;
        let total: usize = axes.iter().map(|axis| axis.spread).product();
        for spread in 0..total {
            let (mut left, mut at, mut index, mut unit) = (spread, position, 0, 1);
            let inside = axes.iter().rev().all(|axis| {
                let coordinate = at % axis.count * axis.spread + left % axis.spread;
                (left, at) = (left / axis.spread, at / axis.count);
                index += coordinate * unit;
                unit *= axis.result;
                coordinate < axis.result
            });
            if inside {
                f(spread, index);
            }
        }
    }

    /// Calls `f(offset, run)` for each column phase of a strip's row, for a range of positions.
    #[inline(always)]
    pub(super) fn for_each_run(&self, begin: usize, end: usize, mut f: impl FnMut(usize, Run)) {
        for (i, &remainder) in self.strip.col.remainders.iter().enumerate() {
            let run = match self.strip.runs.get(i) {
                Some(&run) => run,
                None => self.column_run(remainder, begin % self.cols.count, end - begin),
            };
            f(i * self.strip.col_phase, run);
        }
    }
}
