//! Loads by computed index must have zero strides: programs with other strides are rejected.

#![allow(clippy::unwrap_used, reason = "a test that fails may panic")]

use ortrain_expr::{Access, Builder, DType, Type};
use ortrain_program::{GradientModes, Instruction, Load, Nest, Operand, ProgramBuilder};

const ROWS: usize = 2;
const COLUMNS: usize = 3;

/// Returns the error for a map with a load by computed index of these strides.
fn rejection_message(strides: [isize; 2]) -> Option<String> {
    let mut b = ProgramBuilder::new();
    let [from, to] = ["from", "to"].map(|name| b.work(name, DType::F32, ROWS * COLUMNS));
    let mut e = Builder::new();
    let (row, width) = (e.coordinate(0), e.int(COLUMNS as i64));
    let index = e.mul(row, width);
    let value = e.load_at(0, index, Type::F32);
    let [from, to] = [from, to].map(|id| Operand::contiguous(id, DType::F32, &[ROWS, COLUMNS]));
    let access = Access { strides: strides.into_iter().collect(), ..from.access.clone() };
    let nest = Nest {
        dims: [ROWS, COLUMNS].into_iter().collect(),
        inner: 0,
        segments: None,
        loads: vec![Load::Buffer(from.with_access(access))],
        expr: e.finish(&[value]),
        reductions: Vec::new(),
        stores: vec![to],
    };
    let node = "node \"turned\" (Reverse)".into();
    b.emit(Instruction::from(nest), GradientModes::ALL, &node).err().map(|error| error.to_string())
}

#[test]
fn strides_of_computed_index_loads_are_rejected() {
    assert_eq!(rejection_message([0, 0]), None);
    for strides in [[3, 1], [0, 1], [3, 0]] {
        let message = format!(
            "node \"turned\" (Reverse) was lowered to an invalid Map instruction: load 0 is read at a computed \
             index, so its strides must be zero, got {strides:?}"
        );
        assert_eq!(rejection_message(strides), Some(message));
    }
}
