//! Order in which the values of a function are computed.

use super::ir::{Effect, Value, VectorInst, VectorProgram};

/// Values in the order of their computation: each before its users, and not long before.
pub(super) struct ValueOrder<'a> {
    pub(super) lanes: &'a VectorProgram,
    pub(super) values: Vec<Value>,
    /// Positions of users, grouped by value and sorted. Positions of effects follow the positions of values.
    users: Vec<u32>,
    /// Start of the users of each value, and the end of the last ones.
    starts: Vec<u32>,
}

impl<'a> ValueOrder<'a> {
    pub(super) fn new(lanes: &'a VectorProgram) -> ValueOrder<'a> {
        let count = lanes.insts.len();
        let mut order =
            ValueOrder { lanes, values: Vec::with_capacity(count), users: Vec::new(), starts: Vec::new() };
        let mut computed = vec![false; count];
        for effect in &lanes.effects {
            order.visit(effect.value(), &mut computed);
        }
        let values = order.values.iter().enumerate();
        let operands =
            values.flat_map(|(k, &value)| lanes.insts[usize::from(value)].operands().map(move |a| (k, a)));
        let effects = lanes.effects.iter().enumerate();
        let stored = effects.map(|(k, effect)| (order.values.len() + k, effect.value()));
        let mut uses: Vec<(Value, u32)> =
            operands.chain(stored).map(|(position, value)| (value, position as u32)).collect();
        uses.sort_unstable();
        order.starts = vec![0; count + 1];
        for &(value, _) in &uses {
            order.starts[usize::from(value) + 1] += 1;
        }
        for value in 0..count {
            order.starts[value + 1] += order.starts[value];
        }
        order.users = uses.into_iter().map(|(_, position)| position).collect();
        order
    }

    pub(super) fn lane(&self, value: Value) -> VectorInst {
        self.lanes.insts[usize::from(value)]
    }

    /// Returns the positions of the users of a value.
    pub(super) fn users(&self, value: Value) -> &[u32] {
        let value = usize::from(value);
        &self.users[self.starts[value] as usize..self.starts[value + 1] as usize]
    }

    /// Returns the number of uses of a value.
    pub(super) fn num_uses(&self, value: Value) -> usize {
        self.users(value).len()
    }

    /// Returns true if a value needs no register before it is used.
    pub(super) fn is_read_at_use(&self, value: Value) -> bool {
        match self.lane(value) {
            VectorInst::Constant(_)
            | VectorInst::FrameBroadcast(_)
            | VectorInst::MemoryBroadcast(_)
            | VectorInst::Sum(..) => true,
            VectorInst::Tile(_) => self.num_uses(value) == 1,
            _ => false,
        }
    }

    /// Appends a value to the order, after its operands.
    fn visit(&mut self, value: Value, computed: &mut [bool]) {
        // Without recursion: dependency chains may be as long as a program.
        let mut stack = vec![(value, false)];
        while let Some((value, ready)) = stack.pop() {
            if computed[usize::from(value)] {
                continue;
            }
            if ready {
                computed[usize::from(value)] = true;
                self.values.push(value);
                continue;
            }
            stack.push((value, true));
            let first = stack.len();
            stack.extend(self.lane(value).operands().map(|operand| (operand, false)));
            stack[first..].reverse();
            if matches!(self.lane(value), VectorInst::Select(..)) {
                // The condition is computed last: some functions have many truth values, and AVX-512 has few mask
                // registers.
                stack[first..].rotate_right(1);
            }
        }
    }

    /// Returns the number of pointers to callers' memory.
    pub(super) fn num_pointers(&self) -> usize {
        let of_lanes = self.values.iter().filter_map(|&value| match self.lane(value) {
            VectorInst::Memory(pointer)
            | VectorInst::Bytes(pointer, _)
            | VectorInst::MemoryBroadcast(pointer) => Some(pointer),
            _ => None,
        });
        let of_effects = self.lanes.effects.iter().filter_map(|effect| match *effect {
            Effect::Memory(pointer, _) | Effect::Bytes(pointer, _) => Some(pointer),
            _ => None,
        });
        of_lanes.chain(of_effects).map(|pointer| usize::from(pointer) + 1).max().unwrap_or(0)
    }
}
