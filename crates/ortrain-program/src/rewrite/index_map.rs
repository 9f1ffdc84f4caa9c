//! Map between the index spaces of two nests.

use ortrain_expr::{Access, Builder, Dims, Inst, Reg, Strides, Type};
use smallvec::{SmallVec, smallvec};

use crate::operand::load_access;
use crate::{Nest, Operand};

/// Maximum number of axes after a split.
const MAX_AXES: usize = 12;

/// For every point of the host's space, the point of the guest's space with the same element of a buffer. The guest is
/// fused into the host.
///
/// Both access the buffer with strides. The guest's access visits every element once, so an element identifies a point
/// of the guest. Each step of the host through the buffer is then a step of the guest, for any order and grouping of
/// axes. If one axis of the host covers several axes of the guest, the axis of the host is split.
#[derive(Debug)]
pub(crate) struct Embedding {
    /// For each axis of the host, the sizes of its parts after the split.
    parts: Vec<SmallVec<[usize; 2]>>,
    digits: Vec<Digit>,
}

/// Digit of an element's position in mixed radix: an axis of the guest, or several axes that all accesses of the guest
/// traverse as one.
#[derive(Debug)]
struct Digit {
    /// Axis, the innermost of merged axes.
    axis: usize,
    /// True if several axes are merged.
    merged: bool,
    size: usize,
    /// Stride in the buffer.
    stride: usize,
    /// Index of the guest at index zero of the host.
    base: usize,
    /// Steps of the guest along each axis of the split host.
    steps: Strides,
}

/// Size of a part of an axis, and the steps along it: indices of digits with their factors.
type Part = (usize, SmallVec<[(usize, usize); 2]>);

impl Embedding {
    /// Creates the embedding of `guest` into a host space of sizes `host`. The guest is a map that visits all elements
    /// of a buffer through the access `stored`. The host visits all or some of them through `at`. Axes of the host may
    /// be split if `split` is true. Returns `None` if the spaces do not match.
    pub(crate) fn new(
        host: &[usize],
        at: &Access,
        guest: &Nest,
        stored: &Access,
        split: bool,
    ) -> Option<Embedding> {
        let mut digits = mixed_radix_digits(guest, stored)?;
        if host.contains(&0) || at.len != stored.len {
            return None;
        }
        for digit in &mut digits {
            digit.base = at.offset / digit.stride % digit.size;
        }
        let mut parts = Vec::with_capacity(host.len());
        for (&size, &stride) in host.iter().zip(&at.strides) {
            let walked: SmallVec<[Part; 2]> = if size == 1 || stride == 0 {
                smallvec![(size, SmallVec::new())]
            } else {
                split_axis(&digits, size, stride.unsigned_abs())?
            };
            if walked.len() > 1 && (!split || stride < 0) {
                return None;
            }
            for (_, factors) in &walked {
                for digit in &mut digits {
                    digit.steps.push(0);
                }
                for &(k, factor) in factors {
                    *digits[k].steps.last_mut()? = factor as isize * stride.signum();
                }
            }
            parts.push(walked.iter().map(|&(size, _)| size).collect());
        }
        let embedding = Embedding { parts, digits };
        let dims = embedding.dims();
        // No carry: every digit stays within its axis.
        let within = |digit: &Digit| {
            let (mut low, mut high) = (digit.base as isize, digit.base as isize);
            for (&step, &dim) in digit.steps.iter().zip(&dims) {
                let end = step * (dim as isize - 1);
                low += end.min(0);
                high += end.max(0);
            }
            low >= 0 && high < digit.size as isize
        };
        (dims.len() <= MAX_AXES && embedding.digits.iter().all(within)).then_some(embedding)
    }

    /// Returns the sizes of the axes of the split host.
    fn dims(&self) -> Dims {
        self.parts.iter().flatten().copied().collect()
    }

    fn is_split(&self) -> bool {
        self.parts.iter().any(|parts| parts.len() > 1)
    }

    /// Returns an access of the host after the split.
    fn split(&self, access: &Access) -> Access {
        let mut strides = Strides::new();
        for (parts, &stride) in self.parts.iter().zip(&access.strides) {
            let mut inside: usize = parts.iter().product();
            for &part in parts {
                inside /= part;
                strides.push(stride * inside as isize);
            }
        }
        Access { strides, ..*access }
    }

    /// Returns the host with split axes. Trailing reduced axes that the embedding does not cover are unchanged.
    pub(crate) fn split_host(&self, nest: &Nest) -> Nest {
        if !self.is_split() {
            return nest.clone();
        }
        let known = self.parts.len();
        let outer_rank = nest.dims.len() - nest.inner;
        let rest = &nest.dims[known..];
        let operand = |operand: &Operand| {
            let mut split = self.split(&operand.access);
            split.strides.extend_from_slice(&operand.access.strides[known..]);
            operand.with_access(split)
        };
        let inner: usize = self.parts.iter().skip(outer_rank).map(SmallVec::len).sum();
        let first = |axis: usize| -> usize { self.parts[..axis].iter().map(SmallVec::len).sum() };
        let mut b = Builder::new();
        let regs = b.copy(&nest.expr, |b, inst, ty| match inst {
            Inst::Coordinate(axis) if usize::from(axis) >= known => {
                b.coordinate(first(known) + usize::from(axis) - known)
            }
            Inst::Coordinate(axis) => {
                let parts = &self.parts[usize::from(axis)];
                let at = first(usize::from(axis));
                let mut sum = b.coordinate(at);
                for (k, &part) in parts.iter().enumerate().skip(1) {
                    let (next, size) = (b.coordinate(at + k), b.int(part as i64));
                    let shifted = b.mul(sum, size);
                    sum = b.add(shifted, next);
                }
                sum
            }
            other => b.push(other, ty),
        });
        let (expr, reductions) = b.finish_copy(&nest.expr, &nest.reductions, &regs);
        Nest {
            dims: self.dims().into_iter().chain(rest.iter().copied()).collect(),
            inner: inner + rest.len().min(nest.inner),
            expr,
            reductions,
            ..nest.map_operands(operand)
        }
    }

    /// Returns an access of the guest as an access of the split host.
    pub(crate) fn access(&self, access: &Access) -> Access {
        let mut new_access = self.gathered(access);
        let mut offset = access.offset as isize;
        for digit in &self.digits {
            let stride = access.strides[digit.axis];
            offset += digit.base as isize * stride;
            for (sum, &step) in new_access.strides.iter_mut().zip(&digit.steps) {
                *sum += step * stride;
            }
        }
        new_access.offset = offset as usize;
        new_access
    }

    /// Returns an access of the guest that is read only by computed index, as an access of the split host.
    pub(crate) fn gathered(&self, access: &Access) -> Access {
        let axes = self.parts.iter().map(SmallVec::len).sum();
        Access { strides: Strides::from_elem(0, axes), ..*access }
    }

    /// Computes the guest's index along one of its axes from the indices of the split host.
    pub(crate) fn coordinate(&self, b: &mut Builder, axis: usize) -> Reg {
        let Some(digit) = self.digits.iter().find(|digit| digit.axis == axis) else { return b.int(0) };
        debug_assert!(!digit.merged, "axes whose positions are asked for are not merged");
        let mut sum = b.int(digit.base as i64);
        for (k, &step) in digit.steps.iter().enumerate().filter(|&(_, &step)| step != 0) {
            let (position, step) = (b.coordinate(k), b.int(step as i64));
            let scaled = b.mul(position, step);
            sum = b.add(sum, scaled);
        }
        sum
    }
}

/// Returns the guest's axes in descending order of strides, if they visit every element once.
fn mixed_radix_digits(guest: &Nest, stored: &Access) -> Option<Vec<Digit>> {
    if guest.dims.contains(&0) || stored.offset != 0 {
        return None;
    }
    let mut axes: SmallVec<[usize; 6]> = (0..guest.dims.len()).filter(|&axis| guest.dims[axis] > 1).collect();
    axes.sort_by_key(|&axis| stored.strides[axis]);
    let mut digits: Vec<Digit> = Vec::new();
    let mut unit = 1usize;
    for axis in axes {
        if usize::try_from(stored.strides[axis]) != Ok(unit) {
            return None;
        }
        let size = guest.dims[axis];
        match digits.last_mut() {
            Some(inner) if continues_digit(guest, axis, inner) => {
                inner.size *= size;
                inner.merged = true;
            }
            _ => {
                digits.push(Digit {
                    axis,
                    merged: false,
                    size,
                    stride: unit,
                    base: 0,
                    steps: Strides::new(),
                });
            }
        }
        unit = unit.checked_mul(size)?;
    }
    digits.reverse();
    (unit == stored.len).then_some(digits)
}

/// Returns true if all accesses of the guest traverse an axis as a continuation of a digit.
fn continues_digit(guest: &Nest, axis: usize, digit: &Digit) -> bool {
    let reads_coordinate = |(inst, _): &(Inst, Type)| match *inst {
        Inst::Coordinate(read_axis) => usize::from(read_axis) == axis || usize::from(read_axis) == digit.axis,
        _ => false,
    };
    let even = |access: &Access| {
        access.strides[digit.axis].checked_mul(digit.size as isize) == Some(access.strides[axis])
    };
    let mut uneven =
        guest.loads.iter().enumerate().filter(|(_, load)| !even(&load_access(load, &guest.dims)));
    !guest.expr.insts().iter().any(reads_coordinate)
        && uneven.all(|(slot, _)| guest.is_gathered(slot))
        && guest.stores.iter().all(|store| even(&store.access))
}

/// Splits an axis of the host, and returns the step of the guest along each part. Returns `None` if the axis does not
/// fit the digits.
fn split_axis(digits: &[Digit], size: usize, stride: usize) -> Option<SmallVec<[Part; 2]>> {
    let mut factors: SmallVec<[(usize, usize); 2]> = SmallVec::new();
    let mut rest = stride;
    for (k, digit) in digits.iter().enumerate() {
        if rest >= digit.stride {
            factors.push((k, rest / digit.stride));
            rest %= digit.stride;
        }
    }
    let is_unchanged =
        |&(k, factor): &(usize, usize)| factor.checked_mul(size - 1).is_some_and(|end| end < digits[k].size);
    if rest == 0 && factors.iter().all(is_unchanged) {
        return Some(smallvec![(size, factors)]);
    }
    // The axis exceeds one digit: a full turn of the digit is a step of the next larger digits.
    let &[(k, factor)] = factors.as_slice() else { return None };
    let turn = digits[k].size / factor;
    if k == 0 || !digits[k].size.is_multiple_of(factor) || turn < 2 || !size.is_multiple_of(turn) {
        return None;
    }
    let mut parts = split_axis(digits, size / turn, stride * turn)?;
    parts.push((turn, factors));
    Some(parts)
}
