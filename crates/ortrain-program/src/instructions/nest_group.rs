//! Instruction of several independent nests.

use std::sync::Arc;

use super::body::Body;
use crate::buffer::{Buffer, BufferId};
use crate::cost::{Traffic, nest_flops};
use crate::last_uses::LastUses;
use crate::operand::{Nest, Use, nest_buffers, nest_buffers_mut};

/// Independent nests: no nest stores a buffer that another nest loads or stores. Backends run them in any order or in
/// parallel.
///
/// An optimizer computes the same steps for each parameter: a group merges one step over all parameters.
#[derive(Clone, Debug)]
pub struct NestGroup {
    /// Nests, which cannot fail.
    pub nests: Vec<Arc<Nest>>,
}

impl Body for NestGroup {
    fn name(&self) -> &'static str {
        "NestGroup"
    }

    fn describe_sizes(&self) -> String {
        format!("{} nests", self.nests.len())
    }

    fn buffers(&self, each: &mut dyn FnMut(BufferId, Use)) {
        self.nests.iter().for_each(|nest| nest_buffers(nest, each));
    }

    fn buffers_mut(&mut self, each: &mut dyn FnMut(&mut BufferId, Use)) {
        self.nests.iter_mut().for_each(|nest| nest_buffers_mut(Arc::make_mut(nest), each));
    }

    fn traffic(&self, traffic: &mut Traffic<'_>) {
        self.nests.iter().for_each(|nest| traffic.add_nest(nest));
    }

    fn flops(&self) -> u64 {
        self.nests.iter().map(|nest| nest_flops(nest)).fold(0, u64::saturating_add)
    }

    fn is_empty(&self) -> bool {
        self.nests.iter().all(|nest| Body::is_empty(&**nest))
    }

    fn validate(&self, buffers: &[Buffer]) -> Option<String> {
        let of_one = |nest: &Arc<Nest>| {
            let can_fail = || nest.expr.can_fail().then(|| "a nest of a group can fail".to_owned());
            Body::validate(&**nest, buffers).or_else(can_fail)
        };
        self.nests.iter().find_map(of_one).or_else(|| {
            let label = &self.conflicting_buffer(buffers)?.label;
            Some(format!("several nests of a group access {label:?}, which one of them stores"))
        })
    }
}

impl NestGroup {
    /// Returns a buffer that one nest stores and another nest uses.
    fn conflicting_buffer<'b>(&self, buffers: &'b [Buffer]) -> Option<&'b Buffer> {
        let mut used = Vec::new();
        self.buffers(&mut |id, _| used.push(id));
        let mut spans = LastUses::new(buffers, used);
        for nest in &self.nests {
            let mut stored = None;
            nest_buffers(nest, &mut |id, used| {
                stored = stored.or_else(|| (spans.earliest_position(id, used) > 0).then_some(id));
            });
            if let Some(id) = stored {
                return Some(&buffers[id.0 as usize]);
            }
            nest_buffers(nest, &mut |id, used| spans.record(id, used, 0));
        }
        None
    }
}
