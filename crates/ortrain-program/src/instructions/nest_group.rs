//! The instruction that is several nests, none of which needs anything of another one.

use std::sync::Arc;

use super::body::Body;
use crate::buffer::{Buffer, BufferId, Place};
use crate::cost::Traffic;
use crate::operand::{Nest, Use, nest_buffers, nest_buffers_mut};

/// Nests that need nothing of each other: none stores what another one loads or stores. Backends run them in any order, or
/// together.
///
/// An optimizer takes the same few steps for each parameter: a group takes each of them for all parameters.
#[derive(Clone, Debug)]
pub struct NestGroup {
    /// The nests. None of them can fail.
    pub nests: Vec<Arc<Nest>>,
}

impl Body for NestGroup {
    fn name(&self) -> &'static str {
        "NestGroup"
    }

    fn sizes(&self) -> String {
        format!("{} nests", self.nests.len())
    }

    fn buffers(&self, each: &mut dyn FnMut(BufferId, Use)) {
        self.nests.iter().for_each(|nest| nest_buffers(nest, each));
    }

    fn buffers_mut(&mut self, each: &mut dyn FnMut(&mut BufferId, Use)) {
        self.nests.iter_mut().for_each(|nest| nest_buffers_mut(Arc::make_mut(nest), each));
    }

    fn work(&self, traffic: &mut Traffic<'_>) -> u64 {
        self.nests.iter().map(|nest| traffic.nest(nest)).fold(0, u64::saturating_add)
    }

    fn is_empty(&self) -> bool {
        self.nests.iter().all(|nest| Body::is_empty(&**nest))
    }

    fn fault(&self, buffers: &[Buffer]) -> Option<String> {
        let of_one = |nest: &Arc<Nest>| {
            let can_fail = || nest.expr.can_fail().then(|| "a nest of a group that can fail".to_owned());
            Body::fault(&**nest, buffers).or_else(can_fail)
        };
        self.nests.iter().find_map(of_one).or_else(|| {
            let label = &self.shared(buffers)?.label;
            Some(format!("nests of a group that reach {label:?}, which one of them stores"))
        })
    }
}

/// Bytes that a nest reaches.
struct Span {
    to: usize,
    nest: usize,
    buffer: BufferId,
}

impl NestGroup {
    /// A buffer that one nest stores to and another one reaches.
    fn shared<'b>(&self, buffers: &'b [Buffer]) -> Option<&'b Buffer> {
        let mut spans = Vec::new();
        for (nest, body) in self.nests.iter().enumerate() {
            nest_buffers(body, &mut |buffer, used| {
                let (memory, from, to) = span(buffer, &buffers[buffer.0 as usize]);
                spans.push((memory, from, used.writes(), Span { to, nest, buffer }));
            });
        }
        spans.sort_by_key(|&(memory, from, ..)| (memory, from));
        // Spans of the memory that reach behind the place where the sweep is.
        let (mut loaded, mut stored): (Vec<Span>, Vec<Span>) = (Vec::new(), Vec::new());
        let mut last = None;
        for (memory, from, is_stored, span) in spans {
            if last.replace(memory) != Some(memory) {
                loaded.clear();
                stored.clear();
            }
            let meets = |other: &Span| other.nest != span.nest;
            stored.retain(|other| other.to > from);
            if is_stored {
                loaded.retain(|other| other.to > from);
            }
            if stored.iter().any(meets) || is_stored && loaded.iter().any(meets) {
                return Some(&buffers[span.buffer.0 as usize]);
            }
            if is_stored { stored.push(span) } else { loaded.push(span) }
        }
        None
    }
}

/// The memory that a buffer lies in before any is placed in the arena, and the bytes there.
pub(crate) fn span(id: BufferId, buffer: &Buffer) -> ((u8, u32), usize, usize) {
    match buffer.place {
        Place::Plane(plane, at) => ((0, plane.0), at, at + buffer.bytes()),
        Place::Work(_) => ((1, id.0), 0, 1),
        Place::Constant(number) => ((2, number as u32), 0, 1),
    }
}
