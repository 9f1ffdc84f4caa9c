//! Queue of a device: its stream, and pinned memory for copies.
//!
//! Small writes are collected. The next run takes them along with its scalars in one copy to a block on the device, and
//! its first work distributes them. Any other work writes them first.

use std::ops::Range;
use std::sync::Arc;

use ortrain_codegen::Fault;
use ortrain_program::Program;

use crate::driver::{Address, Call, Event, Pinned, Stream, allocate};

/// Bytes of pinned memory for one copy.
const SLOT_BYTES: usize = 2 << 20;
/// Number of copies that can be under way at once. The host waits for the oldest if there are more.
const SLOTS: usize = 4;
/// Bytes at the start of a slot for the scalars of a run.
pub(crate) const SCALAR_BYTES: usize = 256;
/// Alignment of the writes in a slot.
const WRITE_ALIGNMENT: usize = 16;

/// Pinned memory for a copy to the device.
#[derive(Debug)]
struct Slot {
    memory: Pinned,
    /// Mark behind the copy.
    copied: Event,
    is_used: bool,
}

/// Collected write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Write {
    pub(crate) to: Address,
    /// Offset in the slot.
    pub(crate) offset: usize,
    pub(crate) bytes: usize,
}

/// Queue of a device.
#[derive(Debug)]
pub(crate) struct Queue {
    pub(crate) stream: Stream,
    slots: Vec<Slot>,
    /// Index of the slot that collects writes.
    current: usize,
    /// Number of bytes that are used in the slot.
    filled: usize,
    writes: Vec<Write>,
    readback: Pinned,
    /// Memory on the device with the layout of a slot.
    block: Address,
    /// Words of the first fault that no read has reported.
    fault: Address,
    /// Words of no fault.
    no_fault: Address,
    /// Streams of other libraries that use memory of this device, the latest last.
    consumers: Vec<u64>,
    /// Runs with guards since the last read, by their numbers.
    guarded_runs: Vec<(u32, Arc<Program>)>,
    next_run: u32,
}

/// Maximum number of runs with guards between two reads. The next one waits for the device.
const MAX_GUARDED_RUNS: usize = 256;
/// Handle of the default stream of CUDA. Libraries use it unless their user chooses another stream.
pub(crate) const DEFAULT_STREAM: u64 = 1;
/// Maximum number of streams of other libraries.
const MAX_CONSUMERS: usize = 4;
/// Bytes of a fault.
const FAULT_BYTES: usize = size_of_val(&Fault::NONE);

impl Queue {
    pub(crate) fn new() -> Call<Queue> {
        let slot =
            |_| Ok(Slot { memory: Pinned::new(SLOT_BYTES)?, copied: Event::new(false)?, is_used: false });
        let mut queue = Queue {
            stream: Stream::new()?,
            slots: (0..SLOTS).map(slot).collect::<Call<_>>()?,
            current: 0,
            filled: SCALAR_BYTES,
            writes: Vec::new(),
            readback: Pinned::new(SLOT_BYTES)?,
            block: allocate(SLOT_BYTES)?,
            fault: allocate(FAULT_BYTES)?,
            no_fault: allocate(FAULT_BYTES)?,
            consumers: Vec::new(),
            guarded_runs: Vec::with_capacity(MAX_GUARDED_RUNS),
            next_run: 0,
        };
        for to in [queue.fault, queue.no_fault] {
            // SAFETY: both were allocated above and are never freed.
            unsafe { queue.write(to, bytemuck::cast_slice(&Fault::NONE)) }?;
        }
        Ok(queue)
    }

    /// Makes later work of a stream of another library wait for this queue. From then on, this queue waits for the work
    /// of that stream before its own.
    pub(crate) fn order_before(&mut self, stream: u64) -> Call<()> {
        Stream::from_handle(stream).wait_for(&self.stream)?;
        if !self.consumers.contains(&stream) {
            if self.consumers.len() == MAX_CONSUMERS {
                self.consumers.remove(0);
            }
            self.consumers.push(stream);
        }
        Ok(())
    }

    /// Makes later work of this queue wait for a stream of another library.
    pub(crate) fn order_after(&mut self, stream: u64) -> Call<()> {
        self.stream.wait_for(&Stream::from_handle(stream))
    }

    /// Waits, on the device, for the work of other libraries so far. A stream that does not exist any more is forgotten.
    pub(crate) fn wait_for_consumers(&mut self) {
        let Queue { consumers, stream, .. } = self;
        consumers.retain(|&consumer| stream.wait_for(&Stream::from_handle(consumer)).is_ok());
    }

    /// Returns the address of the fault.
    pub(crate) fn fault(&self) -> Address {
        self.fault
    }

    /// Returns a number for a run.
    pub(crate) fn number_run(&mut self) -> u32 {
        self.next_run = self.next_run.wrapping_add(1);
        self.next_run
    }

    /// Remembers a run with guards until a read.
    pub(crate) fn remember_guards(&mut self, number: u32, program: &Arc<Program>) {
        self.guarded_runs.push((number, program.clone()));
    }

    /// Returns true if a fault must be read before another run with guards.
    pub(crate) fn must_settle(&self) -> bool {
        self.guarded_runs.len() >= MAX_GUARDED_RUNS
    }

    /// Returns true if an earlier run may have failed.
    pub(crate) fn may_have_failed(&self) -> bool {
        !self.guarded_runs.is_empty()
    }

    /// Returns the fault of earlier runs with its program, after all work. It is reported once.
    pub(crate) fn take_fault(&mut self) -> Call<Option<(Fault, Arc<Program>)>> {
        if self.guarded_runs.is_empty() {
            return Ok(None);
        }
        let mut words = Fault::NONE;
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut words);
        let memory = &mut self.readback.bytes_mut()[..FAULT_BYTES];
        // SAFETY: the words are never freed. The memory is read after the stream has run.
        unsafe { self.stream.download(memory, self.fault) }?;
        self.stream.wait()?;
        bytes.copy_from_slice(memory);
        let fault = Fault::read(words);
        let program = |fault: &Fault| {
            let run = self.guarded_runs.iter().find(|(number, _)| *number == fault.run);
            run.map(|(_, program)| program.clone())
        };
        let found = fault.and_then(|fault| program(&fault).map(|program| (fault, program)));
        self.guarded_runs.clear();
        if fault.is_some() {
            // SAFETY: neither is ever freed.
            unsafe { self.stream.copy(self.fault, self.no_fault, FAULT_BYTES) }?;
        }
        Ok(found)
    }

    /// Returns the address of the scalars of a run.
    pub(crate) fn scalars(&self) -> Address {
        self.block
    }

    /// Returns the collected writes.
    pub(crate) fn writes(&self) -> &[Write] {
        &self.writes
    }

    /// Waits until the current slot is free.
    fn free_slot(&mut self) -> Call<&mut Slot> {
        let slot = &mut self.slots[self.current];
        if slot.is_used {
            slot.copied.wait()?;
            slot.is_used = false;
        }
        Ok(slot)
    }

    /// Begins to use the next slot, after the copies from this one.
    fn next_slot(&mut self) -> Call<()> {
        let slot = &mut self.slots[self.current];
        slot.copied.record(&self.stream)?;
        slot.is_used = true;
        self.current = (self.current + 1) % SLOTS;
        self.filled = SCALAR_BYTES;
        self.writes.clear();
        Ok(())
    }

    /// Writes bytes to an allocated range, in the order of calls.
    ///
    /// # Safety
    /// The range is allocated when the write runs; [`Queue::forget_writes`] ends the collection.
    pub(crate) unsafe fn write(&mut self, to: Address, bytes: &[u8]) -> Call<()> {
        if self.filled + bytes.len() > SLOT_BYTES {
            self.flush()?;
        }
        for (at, piece) in
            (to..).step_by(SLOT_BYTES - SCALAR_BYTES).zip(bytes.chunks(SLOT_BYTES - SCALAR_BYTES))
        {
            let offset = self.filled;
            self.free_slot()?.memory.bytes_mut()[offset..][..piece.len()].copy_from_slice(piece);
            self.writes.push(Write { to: at, offset, bytes: piece.len() });
            self.filled = (offset + piece.len()).next_multiple_of(WRITE_ALIGNMENT);
            if self.filled >= SLOT_BYTES {
                self.flush()?;
            }
        }
        Ok(())
    }

    /// Enqueues the collected writes.
    pub(crate) fn flush(&mut self) -> Call<()> {
        if self.writes.is_empty() {
            return Ok(());
        }
        self.writes.iter().try_for_each(|write| self.enqueue_write(write))?;
        self.next_slot()
    }

    /// Enqueues the collected writes if one of them overlaps a range of `bytes` bytes at one of these addresses.
    pub(crate) fn flush_overlapping(&mut self, starts: [Address; 2], bytes: usize) -> Call<()> {
        let overlaps = |write: &Write, start: Address| {
            write.to < start + bytes as u64 && start < write.to + write.bytes as u64
        };
        match self.writes.iter().any(|write| starts.iter().any(|&start| overlaps(write, start))) {
            true => self.flush(),
            false => Ok(()),
        }
    }

    /// Enqueues the collected writes to other memory than a range. The writes to the range stay collected.
    pub(crate) fn flush_outside(&mut self, range: Range<Address>) -> Call<()> {
        let is_inside = |write: &Write| range.start <= write.to && write.to + write.bytes as u64 <= range.end;
        let mut outside = self.writes.iter().filter(|write| !is_inside(write));
        outside.try_for_each(|write| self.enqueue_write(write))?;
        self.writes.retain(is_inside);
        Ok(())
    }

    /// Enqueues a collected write. The mark behind the current slot follows.
    fn enqueue_write(&self, write: &Write) -> Call<()> {
        let memory = self.slots[self.current].memory.bytes();
        // SAFETY: the slot is not used before the mark behind the copies is reached. The range is allocated by the
        // contract of `write`.
        unsafe { self.stream.upload(write.to, &memory[write.offset..][..write.bytes]) }
    }

    /// Forgets collected writes to a range that is about to be freed.
    pub(crate) fn forget_writes(&mut self, start: Address, bytes: usize) {
        self.writes.retain(|write| write.to < start || write.to >= start + bytes as u64);
    }

    /// Enqueues one copy of scalars and collected writes to the block on the device.
    pub(crate) fn upload_block(&mut self, scalars: &[u8]) -> Call<()> {
        self.free_slot()?.memory.bytes_mut()[..scalars.len()].copy_from_slice(scalars);
        let used = if self.writes.is_empty() { scalars.len() } else { self.filled.min(SLOT_BYTES) };
        let memory = self.slots[self.current].memory.bytes();
        // SAFETY: the slot is not used before the mark behind the copy is reached; the block is never freed.
        unsafe { self.stream.upload(self.block, &memory[..used]) }?;
        self.next_slot()
    }

    /// Enqueues the distribution of writes from the block.
    ///
    /// # Safety
    /// The ranges of the writes are allocated when the work runs.
    pub(crate) unsafe fn distribute(&self, writes: &[Write]) -> Call<()> {
        writes.iter().try_for_each(|write| {
            // SAFETY: the contract of this function; the block is never freed.
            unsafe { self.stream.copy(write.to, self.block + write.offset as u64, write.bytes) }
        })
    }

    /// Copies an allocated range to the host, after all earlier work.
    ///
    /// # Safety
    /// The range is allocated.
    pub(crate) unsafe fn read(&mut self, from: Address, bytes: &mut [u8]) -> Call<()> {
        self.flush()?;
        for (at, piece) in (from..).step_by(SLOT_BYTES).zip(bytes.chunks_mut(SLOT_BYTES)) {
            let memory = &mut self.readback.bytes_mut()[..piece.len()];
            // SAFETY: the contract of this function. The memory is read after the stream has run.
            unsafe { self.stream.download(memory, at) }?;
            self.stream.wait()?;
            piece.copy_from_slice(memory);
        }
        Ok(())
    }
}
