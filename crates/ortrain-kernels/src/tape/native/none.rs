//! Machines without code of their own: no group takes an operation.

use ortrain_expr::Type;
use rustc_hash::FxHashMap;

use crate::isa::Isa;
use crate::tape::memory::Reach;
use crate::tape::{Op, Place, Site, Size};

/// What a group would have to know.
pub(in crate::tape) struct Context<'a> {
    pub(in crate::tape) isa: Isa,
    pub(in crate::tape) sizes: &'a dyn Fn(Place) -> Size,
    pub(in crate::tape) constants: &'a FxHashMap<Place, u64>,
    pub(in crate::tape) stores: &'a [Reach],
    pub(in crate::tape) readers: &'a FxHashMap<Place, usize>,
    pub(in crate::tape) piece: usize,
}

pub(in crate::tape) fn takes(_: &Op, _: &Context<'_>) -> bool {
    false
}

#[derive(Clone, Debug)]
pub(in crate::tape) enum Group {}

impl Group {
    pub(in crate::tape) fn new(_: &[Op], _: &Context<'_>, _: impl FnMut() -> Place) -> Option<Group> {
        None
    }

    pub(in crate::tape) fn reads(&self) -> &[Place] {
        match *self {}
    }

    pub(in crate::tape) fn writes(&self) -> &[Place] {
        match *self {}
    }

    pub(in crate::tape) fn compile(&self, _: &dyn Fn(Place) -> Place) -> Option<Native> {
        match *self {}
    }
}

#[derive(Debug)]
pub(in crate::tape) enum Native {}

impl Native {
    pub(in crate::tape) unsafe fn run(&self, _: &Site<'_>, _: usize, _: usize, _: usize) {
        match *self {}
    }
}
