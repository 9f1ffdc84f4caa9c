//! Instruction of a single nest: a map, or reductions and a map.

use ortrain_expr::{Access, Segments};

use super::body::{Body, nest_fault};
use crate::buffer::{Buffer, share_bytes};
use crate::operand::{Nest, Operand};

impl Body for Nest {
    fn name(&self) -> &'static str {
        if self.is_map() { "Map" } else { "Reduce" }
    }

    fn describe_sizes(&self) -> String {
        match &self.segments {
            Some(segments) => format!("{} segments of {}", segments.len(), self.dims[1]),
            None if self.is_map() => format!("{:?}", self.dims.as_slice()),
            None => format!("{:?} over {:?}", self.outer_dims(), self.inner_dims()),
        }
    }

    fn validate(&self, buffers: &[Buffer]) -> Option<String> {
        nest_fault(self, &[], buffers)
            .or_else(|| self.validate())
            .or_else(|| segments_fault(self, self.segments.as_ref()?, buffers))
    }

    fn nest(&self) -> Option<&Nest> {
        Some(self)
    }

    fn nest_mut(&mut self) -> Option<&mut Nest> {
        Some(self)
    }

    fn is_empty(&self) -> bool {
        let no_points = |segments: &Segments| self.is_map() && segments.num_points() == 0;
        self.outer_dims().contains(&0) || self.segments.as_ref().is_some_and(no_points)
    }
}

/// Returns a fault if a nest with segments stores elements that it also loads, or stores twice.
fn segments_fault(nest: &Nest, segments: &Segments, buffers: &[Buffer]) -> Option<String> {
    let buffer = |operand: &Operand| &buffers[operand.buffer.0 as usize];
    for (k, to) in nest.stores.iter().enumerate() {
        let mut overlapping = nest.stores[..k].iter().filter(|other| {
            share_bytes(buffer(to), buffer(other))
                && !(to.buffer == other.buffer && are_disjoint(&to.access, &other.access, segments))
        });
        if let Some(other) = overlapping.next() {
            let [to, other] = [to, other].map(|operand| &buffer(operand).label);
            return Some(format!("stores to {to:?} can overlap stores to {other:?}"));
        }
        let mut loads = nest.loads.iter().enumerate().filter_map(|(slot, load)| {
            let from = load.operand()?;
            let is_disjoint = to.buffer == from.buffer
                && !nest.is_gathered(slot)
                && (from.access == to.access || are_disjoint(&to.access, &from.access, segments));
            (share_bytes(buffer(to), buffer(from)) && !is_disjoint).then_some((slot, from))
        });
        if let Some((slot, from)) = loads.next() {
            let [from, to] = [from, to].map(|operand| &buffer(operand).label);
            return Some(format!(
                "load {slot} of {from:?} can read elements that are stored to {to:?}; it needs the access of the store"
            ));
        }
    }
    None
}

/// Returns true if two accesses to one buffer provably share no element over the segments.
fn are_disjoint(a: &Access, b: &Access, segments: &Segments) -> bool {
    if let (&[step, 0], &[other, 0]) = (a.strides.as_slice(), b.strides.as_slice())
        && step == other
        && step != 0
    {
        // Different columns of one table.
        return !a.offset.abs_diff(b.offset).is_multiple_of(step.unsigned_abs());
    }
    // Disjoint ranges.
    let dims = [segments.len(), segments.iter().last().map_or(0, |range| range.end)];
    match (a.position_range(&dims), b.position_range(&dims)) {
        (Some(a), Some(b)) => a.1 < b.0 || b.1 < a.0,
        _ => false,
    }
}
