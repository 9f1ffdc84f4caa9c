//! Programs on planes of another owner: at any aligned address, with exactly the bytes that the program
//! requires.
#![cfg(unix)]

use std::ptr::null_mut;
use std::sync::Arc;
use std::sync::atomic::AtomicU8;

use ortrain_program::{
    Backend, Bindings, BorrowedMemory, BufferLocation, GradientMode, Instruction, Memory, Reference,
    RunError, Scalars, Workspace,
};
use ortrain_testkit::programs::{Kinds, RandomProgram, Size, run_program_on};

mod common;

const PAGE: usize = 1 << 16;
const ENTRIES: [GradientMode; 2] = [GradientMode::Accumulate, GradientMode::Overwrite];

/// Pages between two guard pages: an access before the first byte or after the last one ends the process.
#[derive(Debug)]
struct GuardedMemory {
    map: usize,
    pages: usize,
    start: usize,
    len: usize,
    read_only: bool,
}

impl GuardedMemory {
    /// Creates bytes that end `gap` bytes before a guard page.
    fn new(len: usize, gap: usize, read_only: bool) -> GuardedMemory {
        let pages = (len + gap).div_ceil(PAGE) + 2;
        // SAFETY: a new mapping, at an address that the system chooses.
        let map = unsafe {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANON;
            libc::mmap(null_mut(), pages * PAGE, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0)
        };
        assert_ne!(map, libc::MAP_FAILED);
        for guard in [0, (pages - 1) * PAGE] {
            // SAFETY: complete pages of the mapping, still unused.
            assert_eq!(unsafe { libc::mprotect(map.byte_add(guard), PAGE, libc::PROT_NONE) }, 0);
        }
        let map = map.expose_provenance();
        GuardedMemory { map, pages, start: map + (pages - 1) * PAGE - gap - len, len, read_only }
    }
}

impl BorrowedMemory for GuardedMemory {
    fn bytes(&self) -> &[AtomicU8] {
        // SAFETY: the bytes are in readable and writable pages of the mapping, which lives as long as `self`.
        unsafe { std::slice::from_raw_parts(std::ptr::with_exposed_provenance(self.start), self.len) }
    }

    fn is_read_only(&self) -> bool {
        self.read_only
    }
}

impl Drop for GuardedMemory {
    fn drop(&mut self) {
        // SAFETY: it is the mapping of `new`, and no longer in use.
        unsafe { libc::munmap(std::ptr::with_exposed_provenance_mut(self.map), self.pages * PAGE) };
    }
}

/// Weights of products and convolutions, and updated state, are contiguous in the plane, up to its end. No
/// access leaves the plane, and every bit is the same as in memory of the process.
#[test]
fn caller_planes_give_identical_results() {
    let levels = common::every_level();
    let mut planes = 0;
    for (size, seeds) in [(Size::Small, 0..600), (Size::Large, 600..680)] {
        let kinds = Kinds { size, ..Kinds::ALL };
        for seed in seeds {
            let program = Arc::new(RandomProgram::new(seed, kinds).finish(true));
            let Some(bytes) = program.planes.first().map(|used| used.bytes) else { continue };
            planes += 1;
            for (level, entry) in levels.iter().flat_map(|level| ENTRIES.map(|entry| (level, entry))) {
                let expected = run_program_on(&program, level, seed, entry, &Memory::new(bytes));
                for gap in [0, 4, 12] {
                    let plane = Memory::borrowed(Arc::new(GuardedMemory::new(bytes, gap, false)));
                    let got = run_program_on(&program, level, seed, entry, &plane);
                    assert!(got == expected, "seed {seed}, {entry:?}, {gap} bytes before the end\n{program}");
                }
            }
        }
    }
    // The test covered some planes.
    assert!(planes > 300, "{planes} programs have a plane");
}

/// A program rejects a plane with unaligned elements, and a read-only plane that it would write to.
#[test]
fn rejects_unsuitable_planes() {
    let kinds = Kinds {
        jumps: false,
        narrow: false,
        windows: true,
        parts: false,
        updates: false,
        segments: false,
        size: Size::Small,
    };
    let backends: [Arc<dyn Backend>; 2] = [Arc::new(Reference), Arc::new(ortrain_cpu::Cpu::new().unwrap())];
    let mut outcomes = [0, 0];
    for seed in 0..200 {
        let program = Arc::new(RandomProgram::new(seed, kinds).finish(true));
        let Some(bytes) = program.planes.first().map(|used| used.bytes) else { continue };
        let steps = || program.instructions.iter().map(|scheduled| &scheduled.instruction);
        let in_plane = |id| matches!(program.buffer(id).location, BufferLocation::Plane(..));
        let writes = steps().flat_map(Instruction::writes).any(in_plane);
        if !writes && !steps().flat_map(Instruction::reads).any(in_plane) {
            continue;
        }
        for backend in &backends {
            let executable = backend.compile(program.clone()).unwrap();
            let mut work = Workspace::new(backend.clone());
            work.reserve(program.work_bytes, executable.scratch_bytes()).unwrap();
            let mut run = |gap, read_only| {
                let plane = Memory::borrowed(Arc::new(GuardedMemory::new(bytes, gap, read_only)));
                let bindings = Bindings { planes: &[&plane] };
                let outcome =
                    executable.run(&bindings, &mut work, GradientMode::Accumulate, Scalars::default());
                assert!(outcome.is_ok() || plane.is_zero().unwrap());
                outcome
            };
            for gap in [1, 2, 3] {
                assert_eq!(run(gap, false), Err(RunError::Unaligned { plane: 0 }), "seed {seed}\n{program}");
            }
            assert_eq!(run(4, false), Ok(()));
            let expected = if writes { Err(RunError::ReadOnly { plane: 0 }) } else { Ok(()) };
            assert_eq!(run(0, true), expected, "seed {seed}\n{program}");
            outcomes[usize::from(writes)] += 1;
        }
    }
    // The test covered both errors.
    assert!(outcomes.iter().all(|&count| count > 10), "{outcomes:?}");
    for (error, sentence) in [
        (RunError::ReadOnly { plane: 3 }, "plane 3 must be writable, but its memory is read-only"),
        (RunError::Unaligned { plane: 3 }, "the address of plane 3 is not a multiple of its element size"),
    ] {
        assert_eq!(error.to_string(), sentence);
    }
}
