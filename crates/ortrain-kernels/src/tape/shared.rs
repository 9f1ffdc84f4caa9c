//! Code that several tapes share: that of nests that differ in nothing but where their buffers begin and end.
//!
//! The steps of a recurrent net, the layers of a transformer, and programs for other batches have most of their nests in
//! common. To make code takes longer than to look for it, and code that runs again is in the instruction cache.

use std::sync::{Arc, Mutex, Weak};

use ortrain_expr::{Access, Nest};
use rustc_hash::FxHashMap;

use super::{Code, Drive, Plan};
use crate::isa::Isa;

/// All that code depends on.
#[derive(PartialEq, Eq, Hash)]
struct Key {
    /// Its accesses lie nowhere.
    nest: Nest,
    drive: Drive,
    outside: Vec<usize>,
    along: Vec<usize>,
    product: bool,
    isa: Isa,
    machine_code: bool,
}

impl Key {
    fn new(plan: &Plan<'_>, isa: Isa, machine_code: bool) -> Key {
        let nowhere = |access: &Access| Access { offset: 0, len: 0, ..access.clone() };
        let list = |accesses: &[Access]| accesses.iter().map(nowhere).collect();
        let Plan { nest, drive, outside, along, product } = *plan;
        let nest = Nest { loads: list(&nest.loads), stores: list(&nest.stores), ..nest.clone() };
        Key { nest, drive, outside: outside.to_vec(), along: along.to_vec(), product, isa, machine_code }
    }
}

/// Code that is in use, and some that was.
struct Codes {
    known: FxHashMap<Key, Weak<Code>>,
    /// When there are so many, those that are not in use any more are forgotten.
    many: usize,
}

/// Fewer are not worth looking through.
const FEW: usize = 256;

static CODES: Mutex<Option<Codes>> = Mutex::new(None);

/// The code of a plan: that of an equal one, if there is one, or what `make` makes.
pub(super) fn code(
    plan: &Plan<'_>,
    isa: Isa,
    machine_code: bool,
    make: impl FnOnce() -> Result<Code, String>,
) -> Result<Arc<Code>, String> {
    let key = Key::new(plan, isa, machine_code);
    // Nobody waits: who is too late makes its own, and in a forked process the lock may never be free again.
    let known = CODES.try_lock().ok().and_then(|codes| codes.as_ref()?.known.get(&key)?.upgrade());
    if let Some(code) = known {
        return Ok(code);
    }
    let code = Arc::new(make()?);
    if let Ok(mut codes) = CODES.try_lock() {
        let codes = codes.get_or_insert_with(|| Codes { known: FxHashMap::default(), many: FEW });
        if codes.known.len() >= codes.many {
            codes.known.retain(|_, code| code.strong_count() > 0);
            codes.many = FEW.max(2 * codes.known.len());
        }
        codes.known.insert(key, Arc::downgrade(&code));
    }
    Ok(code)
}

#[cfg(test)]
mod tests {
    use ortrain_expr::{Builder, DType, Type};

    use super::*;
    use crate::tape::Tape;

    /// `to = from * factor` over matrices of so many columns, in buffers that begin somewhere.
    fn tape(columns: usize, factor: f64, (from, to): (usize, usize)) -> Tape {
        let dims = [6, columns];
        let access = |offset: usize| Access {
            offset,
            len: offset + 6 * columns,
            ..Access::contiguous(DType::F32, &dims)
        };
        let mut b = Builder::new();
        let x = b.load(0, Type::F32);
        let factor = b.constant(Type::F32, factor);
        let product = b.mul(x, factor);
        let nest = Nest {
            dims: dims.into_iter().collect(),
            inner: 0,
            loads: vec![access(from)],
            expr: b.finish(&[product]),
            reductions: Vec::new(),
            stores: vec![access(to)],
        };
        let plan = Plan { nest: &nest, drive: Drive::Map, outside: &[], along: &[0, 1], product: false };
        Tape::new(&plan, Isa::detect()).expect("a good nest")
    }

    /// Other tests that make tapes at the same time may have the lock.
    fn shared(make: impl Fn() -> (Tape, Tape)) -> bool {
        (0..1000).any(|_| {
            let (a, b) = make();
            Arc::ptr_eq(&a.code, &b.code)
        })
    }

    #[test]
    fn nests_that_differ_in_places_share_their_code() {
        assert!(shared(|| (tape(50, 2.0, (0, 0)), tape(50, 2.0, (17, 300)))));
        for other in [|| tape(51, 2.0, (0, 0)), || tape(50, 3.0, (0, 0))] {
            let (a, b) = (tape(50, 2.0, (0, 0)), other());
            assert!(!Arc::ptr_eq(&a.code, &b.code));
        }
    }

    #[test]
    fn what_is_not_in_use_is_forgotten() {
        (1000..1000 + 4 * FEW).for_each(|columns| drop(tape(columns, 2.0, (0, 0))));
        let known = CODES.lock().unwrap().as_ref().map_or(0, |codes| codes.known.len());
        assert!((1..3 * FEW).contains(&known), "{known}");
    }
}
