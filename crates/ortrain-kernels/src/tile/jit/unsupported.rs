//! Stub for machines without code generation: groups support no operation.

use std::sync::Arc;

use super::{Context, Site};
use crate::tile::op::{Op, Slot};

pub(in crate::tile) fn takes(_: &Op, _: &Context<'_>) -> bool {
    false
}

#[derive(Debug)]
pub(in crate::tile) enum Group {}

impl Group {
    pub(in crate::tile) fn new(_: &[Op], _: &Context<'_>, _: impl FnMut() -> Slot) -> Option<Group> {
        None
    }

    pub(in crate::tile) fn reads(&self) -> &[Slot] {
        match *self {}
    }

    pub(in crate::tile) fn writes(&self) -> &[Slot] {
        match *self {}
    }
}

#[derive(Debug, Default)]
pub(in crate::tile) struct CodeMemory;

impl CodeMemory {
    pub(in crate::tile) fn finish(&self) -> bool {
        true
    }
}

#[derive(Debug)]
pub(in crate::tile) struct Functions;

impl Functions {
    pub(in crate::tile) fn new(_: &[Group], _: &dyn Fn(Slot) -> Slot, _: &Arc<CodeMemory>) -> Functions {
        Functions
    }

    pub(in crate::tile) unsafe fn run(&self, _: u16, _: Site<'_>, _: usize, _: usize, _: usize) {
        unreachable!("there are no groups")
    }
}
