//! Code that several tapes share: that of nests that differ in nothing but where their buffers begin and end.
//!
//! The steps of a recurrent net and the layers of a transformer have most of their nests in common. To make code takes
//! longer than to look for it, and code that runs again is in the instruction cache.

use std::cell::RefCell;
use std::fmt;
use std::sync::Arc;

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
}

impl Key {
    fn new(plan: &Plan<'_>, isa: Isa) -> Key {
        let nowhere = |access: &Access| Access { offset: 0, len: 0, ..access.clone() };
        let list = |accesses: &[Access]| accesses.iter().map(nowhere).collect();
        let Plan { nest, drive, outside, along, product } = *plan;
        let nest = Nest { loads: list(&nest.loads), stores: list(&nest.stores), ..nest.clone() };
        Key { nest, drive, outside: outside.to_vec(), along: along.to_vec(), product, isa }
    }
}

/// The code of kernels that are made one after the other, those of a program: what several have in common is made once.
#[derive(Default)]
pub struct Codes {
    known: RefCell<FxHashMap<Key, Arc<Code>>>,
}

impl fmt::Debug for Codes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Codes").field("known", &self.known.borrow().len()).finish()
    }
}

impl Codes {
    /// None yet.
    #[must_use]
    pub fn new() -> Codes {
        Codes::default()
    }

    /// Makes kernels of a level that share code with those that were made with it before.
    #[must_use]
    pub fn compiler(&self, isa: Isa) -> Compiler<'_> {
        Compiler { isa, codes: Some(self) }
    }
}

/// What makes a kernel: an instruction-set level, alone or with the [`Codes`] of other kernels.
#[derive(Clone, Copy, Debug)]
pub struct Compiler<'a> {
    pub(crate) isa: Isa,
    codes: Option<&'a Codes>,
}

impl From<Isa> for Compiler<'_> {
    fn from(isa: Isa) -> Self {
        Compiler { isa, codes: None }
    }
}

impl Compiler<'_> {
    /// The code of a plan: that of an equal one, if there is one, or what `make` makes.
    pub(super) fn code(
        self,
        plan: &Plan<'_>,
        make: impl FnOnce() -> Result<Code, String>,
    ) -> Result<Arc<Code>, String> {
        let Some(codes) = self.codes else { return Ok(Arc::new(make()?)) };
        let key = Key::new(plan, self.isa);
        if let Some(code) = codes.known.borrow().get(&key) {
            return Ok(Arc::clone(code));
        }
        let code = Arc::new(make()?);
        codes.known.borrow_mut().insert(key, Arc::clone(&code));
        Ok(code)
    }
}

#[cfg(test)]
mod tests {
    use ortrain_expr::{Builder, DType, Type};

    use super::*;
    use crate::tape::Tape;

    /// `to = from * factor` over matrices of so many columns, in buffers that begin somewhere.
    fn tape(codes: &Codes, columns: usize, factor: f64, (from, to): (usize, usize)) -> Tape {
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
        Tape::new(&plan, codes.compiler(Isa::detect())).expect("a good nest")
    }

    #[test]
    fn nests_that_differ_in_places_alone_share_their_code() {
        let codes = Codes::new();
        let first = tape(&codes, 50, 2.0, (0, 0));
        for (other, shared) in [
            (tape(&codes, 50, 2.0, (17, 300)), true),
            (tape(&codes, 51, 2.0, (0, 0)), false),
            (tape(&codes, 50, -2.0, (0, 0)), false),
            (tape(&Codes::new(), 50, 2.0, (0, 0)), false),
        ] {
            assert_eq!(Arc::ptr_eq(&first.code, &other.code), shared);
        }
    }
}
