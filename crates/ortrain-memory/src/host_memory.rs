//! Memory of this process.

use std::fmt::{self, Debug, Formatter};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};

use bytemuck::allocation::try_zeroed_slice_box;

/// Alignment, in bytes, of every [`Memory`](crate::Memory) and of every tensor in it.
pub const ALIGNMENT: usize = 256;

/// Rounds up to the next multiple of the alignment.
#[must_use]
pub fn align(bytes: usize) -> usize {
    bytes.next_multiple_of(ALIGNMENT)
}

/// Failed allocation of memory in this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the system cannot allocate {bytes} bytes of memory")]
pub struct OutOfMemory {
    /// Requested number of bytes.
    pub bytes: usize,
}

/// Alignment of memory of at least this size, in bytes: the large pages of most machines. One page fault makes a large
/// page available, instead of hundreds for small pages.
const LARGE: usize = 2 << 20;

/// Smallest page size of any machine, in bytes.
const PAGE: usize = 4 << 10;

const WORD: usize = size_of::<u64>();
/// Number of words of a block. A block has [`ALIGNMENT`] bytes.
const BLOCK: usize = ALIGNMENT / WORD;

/// Memory lent by another owner: a NumPy array, or a buffer of another library.
///
/// The bytes are atomic, because the owner may write to them at any time, from any thread. They may start and end at
/// any address. They stay valid and do not move as long as the lender lives. A [`HostMemory`] with a lender keeps the
/// lender alive.
pub trait BorrowedMemory: Send + Sync + Debug {
    /// Returns the bytes; always the same ones.
    fn bytes(&self) -> &[AtomicU8];

    /// Returns true if borrowers must not write to the bytes.
    fn is_read_only(&self) -> bool;

    /// Copies bytes out. Each byte has the value of some moment of the call. Implementations may replace the slow copy
    /// of single bytes.
    ///
    /// # Panics
    /// Panics if the range ends after the memory.
    fn read(&self, offset: usize, bytes: &mut [u8]) {
        let region = &self.bytes()[offset..][..bytes.len()];
        region.iter().zip(bytes).for_each(|(cell, byte)| *byte = cell.load(Ordering::Relaxed));
    }

    /// Copies bytes in, without touching the bytes beside them. Called only if writing is allowed.
    ///
    /// # Panics
    /// Panics if the range ends after the memory.
    fn write(&self, offset: usize, bytes: &[u8]) {
        let region = &self.bytes()[offset..][..bytes.len()];
        region.iter().zip(bytes).for_each(|(cell, &byte)| cell.store(byte, Ordering::Relaxed));
    }
}

/// Region of this process that never moves and may be read and written concurrently.
///
/// The region is either owned, zeroed and 256-byte aligned ([`HostMemory::try_new`]), or lent, at any address
/// ([`HostMemory::borrowed`]).
///
/// Rust code outside the kernels copies from and to the region by relaxed atomic words or bytes. Kernels and NumPy
/// views use [`HostMemory::as_ptr`]. Concurrent writes have no defined order, but cause no undefined behavior, because
/// no Rust reference into the content exists.
///
/// The operating system supplies zeroed pages on first touch. Memory that is never touched therefore costs nothing.
pub struct HostMemory {
    home: Home,
    bytes: usize,
    /// Capacity in bytes to which the region can grow in place.
    capacity: usize,
    /// True if a caller has claimed the first touch of all pages.
    claimed: AtomicBool,
}

/// Owner of the memory.
enum Home {
    Own(Words),
    Borrowed(Arc<dyn BorrowedMemory>),
}

/// Owned memory of complete blocks.
#[derive(Default)]
struct Words {
    /// Zeroed words, more than requested, to align the region. Allocators get zeroed pages from the system only for
    /// requests without alignment.
    words: Box<[AtomicU64]>,
    /// Index of the first word of the region.
    first: usize,
}

/// Returns the number of bytes of a range before its first complete block, and the number of complete blocks.
fn parts(offset: usize, len: usize) -> (usize, usize) {
    let head = (offset.next_multiple_of(ALIGNMENT) - offset).min(len);
    (head, (len - head) / ALIGNMENT)
}

impl Words {
    fn try_new(bytes: usize) -> Result<Words, OutOfMemory> {
        if bytes == 0 {
            return Ok(Words::default());
        }
        let alignment = if bytes >= LARGE { LARGE } else { ALIGNMENT };
        let count = bytes.div_ceil(ALIGNMENT) * BLOCK + alignment / WORD;
        let words = try_zeroed_slice_box::<AtomicU64>(count).map_err(|()| OutOfMemory { bytes })?;
        let first = words.as_ptr().align_offset(alignment);
        Ok(Words { words, first })
    }

    /// Returns the words of the region from its first block on. There may be more blocks than requested.
    fn region(&self) -> &[AtomicU64] {
        &self.words[self.first..]
    }

    /// Returns the blocks of the region from index `first` on.
    fn blocks(&self, first: usize) -> &[[AtomicU64; BLOCK]] {
        self.region()[first * BLOCK..].as_chunks().0
    }

    fn write(&self, offset: usize, bytes: &[u8]) {
        let (head, blocks) = parts(offset, bytes.len());
        let (first, rest) = bytes.split_at(head);
        let (middle, last) = rest.split_at(blocks * ALIGNMENT);
        self.write_words(offset, first);
        let start = (offset + head) / ALIGNMENT;
        for (block, bytes) in self.blocks(start).iter().zip(middle.as_chunks::<ALIGNMENT>().0) {
            for (word, bytes) in block.iter().zip(bytes.as_chunks().0) {
                word.store(u64::from_ne_bytes(*bytes), Ordering::Relaxed);
            }
        }
        self.write_words(offset + head + middle.len(), last);
    }

    /// Writes word by word. The first and last word may be written in part.
    fn write_words(&self, mut position: usize, mut rest: &[u8]) {
        while !rest.is_empty() {
            let (index, skip) = (position / WORD, position % WORD);
            let len = (WORD - skip).min(rest.len());
            let word = &self.region()[index];
            let mut content =
                if len == WORD { [0; WORD] } else { word.load(Ordering::Relaxed).to_ne_bytes() };
            content[skip..skip + len].copy_from_slice(&rest[..len]);
            word.store(u64::from_ne_bytes(content), Ordering::Relaxed);
            position += len;
            rest = &rest[len..];
        }
    }

    fn read(&self, offset: usize, bytes: &mut [u8]) {
        let (head, blocks) = parts(offset, bytes.len());
        let (first, rest) = bytes.split_at_mut(head);
        let (middle, last) = rest.split_at_mut(blocks * ALIGNMENT);
        let end = offset + head + middle.len();
        self.read_words(offset, first);
        let start = (offset + head) / ALIGNMENT;
        for (block, bytes) in self.blocks(start).iter().zip(middle.as_chunks_mut::<ALIGNMENT>().0) {
            for (word, bytes) in block.iter().zip(bytes.as_chunks_mut().0) {
                *bytes = word.load(Ordering::Relaxed).to_ne_bytes();
            }
        }
        self.read_words(end, last);
    }

    fn read_words(&self, mut position: usize, mut rest: &mut [u8]) {
        while !rest.is_empty() {
            let (index, skip) = (position / WORD, position % WORD);
            let len = (WORD - skip).min(rest.len());
            let content = self.region()[index].load(Ordering::Relaxed).to_ne_bytes();
            rest[..len].copy_from_slice(&content[skip..skip + len]);
            position += len;
            rest = &mut rest[len..];
        }
    }

    /// Writes to every page of a range of bytes, without changing the content.
    fn touch(&self, range: Range<usize>) {
        for byte in range.step_by(PAGE) {
            // Replacing zero by zero counts as a write. A word that is not zero was written before.
            let _ = self.region()[byte / WORD].compare_exchange(0, 0, Ordering::Relaxed, Ordering::Relaxed);
        }
    }
}

impl HostMemory {
    /// Allocates a zeroed region of at least `bytes` bytes, rounded up to complete blocks.
    ///
    /// # Errors
    /// Fails if the system does not provide the memory.
    pub fn try_new(bytes: usize) -> Result<HostMemory, OutOfMemory> {
        HostMemory::with_capacity(bytes, bytes)
    }

    /// Like [`HostMemory::try_new`], but [`HostMemory::grow`] can extend the region to `capacity` bytes. The unused
    /// capacity takes address space, but no memory.
    ///
    /// # Errors
    /// Fails if the system does not provide the memory.
    pub fn with_capacity(bytes: usize, capacity: usize) -> Result<HostMemory, OutOfMemory> {
        let capacity = capacity.max(bytes);
        let home = Home::Own(Words::try_new(capacity)?);
        Ok(HostMemory { home, bytes, capacity, claimed: AtomicBool::new(false) })
    }

    /// Extends the region to at least `bytes` bytes, within its capacity. The content is preserved, and new bytes are
    /// zero. Returns false, and changes nothing, if the capacity is too small.
    pub fn grow(&mut self, bytes: usize) -> bool {
        let fits = bytes <= self.capacity;
        if fits {
            self.bytes = self.bytes.max(bytes);
        }
        fits
    }

    /// Like [`HostMemory::try_new`], for a size that does not exceed the memory that the process already holds.
    ///
    /// # Panics
    /// Panics if the system does not provide the memory.
    #[must_use]
    pub fn new(bytes: usize) -> HostMemory {
        HostMemory::try_new(bytes).expect("the system has memory for a copy of what it holds")
    }

    /// Wraps the bytes of a lender at their address. The lender lives until this region is dropped.
    #[must_use]
    pub fn borrowed(lender: Arc<dyn BorrowedMemory>) -> HostMemory {
        let bytes = lender.bytes().len();
        HostMemory { home: Home::Borrowed(lender), bytes, capacity: bytes, claimed: AtomicBool::new(false) }
    }

    /// Returns the requested number of bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Returns true if the region has no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// Returns true if the region belongs to a lender. The owner may read and write it at any time.
    #[must_use]
    pub fn is_borrowed(&self) -> bool {
        matches!(self.home, Home::Borrowed(_))
    }

    /// Returns true if the region is lent for reading only.
    #[must_use]
    pub fn is_read_only(&self) -> bool {
        matches!(&self.home, Home::Borrowed(lender) if lender.is_read_only())
    }

    /// Returns a pointer to the first byte.
    ///
    /// The pointer is valid for reads of [`HostMemory::len`] bytes as long as the memory lives, and for writes unless
    /// [`HostMemory::is_read_only`]. Users must not create Rust references into the memory.
    #[must_use]
    pub fn as_ptr(&self) -> *mut u8 {
        match &self.home {
            Home::Own(words) => words.region().as_ptr().cast::<u8>().cast_mut(),
            Home::Borrowed(lender) => lender.bytes().as_ptr().cast::<u8>().cast_mut(),
        }
    }

    /// Copies bytes in.
    ///
    /// # Panics
    /// Panics if the range ends after the region, or if the region is read-only.
    pub fn write(&self, offset: usize, bytes: &[u8]) {
        assert!(offset + bytes.len() <= self.bytes, "{}+{} bytes into {}", offset, bytes.len(), self.bytes);
        match &self.home {
            Home::Own(words) => words.write(offset, bytes),
            Home::Borrowed(lender) => {
                assert!(!lender.is_read_only(), "borrowed memory is read-only");
                lender.write(offset, bytes);
            }
        }
    }

    /// Copies bytes out.
    ///
    /// # Panics
    /// Panics if the range ends after the region.
    pub fn read(&self, offset: usize, bytes: &mut [u8]) {
        assert!(offset + bytes.len() <= self.bytes, "{}+{} bytes of {}", offset, bytes.len(), self.bytes);
        match &self.home {
            Home::Own(words) => words.read(offset, bytes),
            Home::Borrowed(lender) => lender.read(offset, bytes),
        }
    }

    /// Returns true if all bytes are zero. The check does not allocate pages that were never touched.
    #[must_use]
    pub fn is_zero(&self) -> bool {
        match &self.home {
            Home::Own(words) => words.region()[..self.bytes.div_ceil(WORD)]
                .iter()
                .all(|word| word.load(Ordering::Relaxed) == 0),
            Home::Borrowed(lender) => lender.bytes().iter().all(|byte| byte.load(Ordering::Relaxed) == 0),
        }
    }

    /// Returns a copy of a range.
    ///
    /// # Panics
    /// Panics if the range ends after the region.
    #[must_use]
    pub fn to_vec(&self, offset: usize, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.read(offset, &mut bytes);
        bytes
    }

    /// Returns true at the first call. That caller should [`HostMemory::touch`] the region if it is going to be
    /// written.
    ///
    /// Always returns false for a lent region, because its pages are the owner's concern.
    #[must_use]
    pub fn prefault(&self) -> bool {
        !self.is_borrowed()
            && !self.claimed.load(Ordering::Relaxed)
            && !self.claimed.swap(true, Ordering::Relaxed)
    }

    /// Writes to every page of a range without changing the content. Lent pages are not written.
    ///
    /// A page that is read before its first write is mapped twice. The read maps a page of zeros that all such pages
    /// share. The write then maps a private page, and all cores must drop the old mapping. Several threads may touch
    /// parts of the memory at once, even while others write there.
    ///
    /// # Panics
    /// Panics if the range ends after the region.
    pub fn touch(&self, range: Range<usize>) {
        assert!(range.end <= self.bytes, "{range:?} of {} bytes", self.bytes);
        if let Home::Own(words) = &self.home {
            words.touch(range);
        }
    }

    /// Sets all bytes to zero.
    ///
    /// # Panics
    /// Panics if the region is read-only.
    pub fn clear(&self) {
        match &self.home {
            Home::Own(words) => {
                let used = self.bytes.div_ceil(WORD);
                words.region()[..used].iter().for_each(|word| word.store(0, Ordering::Relaxed));
            }
            Home::Borrowed(_) => {
                for from in (0..self.bytes).step_by(PAGE) {
                    self.write(from, &[0; PAGE][..PAGE.min(self.bytes - from)]);
                }
            }
        }
    }
}

impl Debug for HostMemory {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let lent = if self.is_borrowed() { ", lent" } else { "" };
        write!(f, "HostMemory({} bytes{lent})", self.bytes)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Weak;

    use super::*;

    /// Lender of the bytes from index `from` on.
    #[derive(Debug)]
    struct Lender {
        bytes: Vec<AtomicU8>,
        from: usize,
        read_only: bool,
    }

    impl Lender {
        fn of(from: usize, len: usize) -> Arc<Lender> {
            let bytes = (0..from + len).map(|i| AtomicU8::new((i % 251) as u8)).collect();
            Arc::new(Lender { bytes, from, read_only: false })
        }
    }

    impl BorrowedMemory for Lender {
        fn bytes(&self) -> &[AtomicU8] {
            &self.bytes[self.from..]
        }

        fn is_read_only(&self) -> bool {
            self.read_only
        }
    }

    #[test]
    fn borrowed_memory_is_read_and_written_in_place() {
        for from in [0, 1, 3, 8, 255] {
            for len in [1, 7, 256, 257, PAGE, 2 * PAGE + 5] {
                let lender = Lender::of(from, len);
                let memory = HostMemory::borrowed(lender.clone());
                let mut expected: Vec<u8> = (from..from + len).map(|i| (i % 251) as u8).collect();
                assert_eq!((memory.len(), memory.is_borrowed(), memory.is_read_only()), (len, true, false));
                assert_eq!(memory.as_ptr().cast_const(), lender.bytes().as_ptr().cast::<u8>());
                assert_eq!(memory.to_vec(0, len), expected);
                memory.write(len / 2, &[0xF7]);
                expected[len / 2] = 0xF7;
                assert_eq!(memory.to_vec(0, len), expected);
                assert_eq!(memory.to_vec(len - 1, 1), expected[len - 1..]);
                lender.bytes()[0].store(0xF3, Ordering::Relaxed);
                assert_eq!(memory.to_vec(0, 1), [0xF3]);
                assert!(!memory.prefault());
                memory.touch(0..len);
                assert!(!memory.is_zero());
                memory.clear();
                assert!(memory.is_zero());
                // Bytes before the lent range are unchanged.
                assert!((0..from).all(|i| lender.bytes[i].load(Ordering::Relaxed) == (i % 251) as u8));
            }
        }
        let nothing = HostMemory::borrowed(Lender::of(5, 0));
        assert!(nothing.is_empty() && nothing.is_zero());
        nothing.write(0, &[]);
        nothing.clear();
        assert_eq!(nothing.to_vec(0, 0), []);
    }

    #[test]
    fn borrowed_memory_keeps_its_lender_alive() {
        let lender = Lender::of(0, 9);
        let watched: Weak<Lender> = Arc::downgrade(&lender);
        let memory = HostMemory::borrowed(lender);
        assert!(watched.upgrade().is_some());
        assert_eq!(format!("{memory:?}"), "HostMemory(9 bytes, lent)");
        drop(memory);
        assert!(watched.upgrade().is_none());
    }

    #[test]
    #[should_panic(expected = "borrowed memory is read-only")]
    fn writes_to_read_only_memory_panic() {
        let mut lender = Lender::of(0, 9);
        Arc::get_mut(&mut lender).unwrap().read_only = true;
        let memory = HostMemory::borrowed(lender);
        assert!(memory.is_read_only());
        assert_eq!(memory.to_vec(1, 2), [1, 2]);
        memory.write(0, &[0]);
    }

    #[test]
    fn copies_at_any_offset() {
        let memory = HostMemory::new(40);
        memory.write(0, &[9; 40]);
        memory.write(5, &(0..17).collect::<Vec<u8>>());
        let mut expected = vec![9; 40];
        expected[5..22].copy_from_slice(&(0..17).collect::<Vec<u8>>());
        assert_eq!(memory.to_vec(0, 40), expected);
        assert_eq!(memory.as_ptr() as usize % ALIGNMENT, 0);
    }

    #[test]
    fn new_memory_is_zero_and_aligned() {
        for bytes in [1, ALIGNMENT, ALIGNMENT + 1, 2 * LARGE - 1, 2 * LARGE, 3 * LARGE + 5] {
            let memory = HostMemory::new(bytes);
            let alignment = if bytes < 2 * LARGE { ALIGNMENT } else { LARGE };
            assert_eq!(memory.as_ptr() as usize % alignment, 0, "{bytes} bytes");
            assert_eq!(memory.len(), bytes);
            assert!(memory.to_vec(0, bytes).iter().all(|&byte| byte == 0), "{bytes} bytes");
            memory.write(bytes - 1, &[7]);
            assert_eq!(memory.to_vec(bytes - 1, 1), [7]);
            memory.clear();
            assert_eq!(memory.to_vec(bytes - 1, 1), [0]);
        }
        assert!(HostMemory::new(0).is_empty());
        HostMemory::new(0).write(0, &[]);
    }

    #[test]
    fn impossible_allocation_is_an_error() {
        for bytes in [usize::MAX, usize::MAX / 2, isize::MAX as usize] {
            assert_eq!(HostMemory::try_new(bytes).err(), Some(OutOfMemory { bytes }));
        }
    }

    /// Returns the resident anonymous memory of this process in KiB.
    #[cfg(target_os = "linux")]
    fn resident_kib() -> usize {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
        line.trim().trim_end_matches(" kB").parse().unwrap()
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn memory_grows_in_place() {
        let mut memory = HostMemory::with_capacity(ALIGNMENT, 4 * ALIGNMENT).unwrap();
        let start = memory.as_ptr();
        memory.write(0, &[7; ALIGNMENT]);
        assert_eq!(memory.len(), ALIGNMENT);
        assert!(memory.grow(3 * ALIGNMENT) && memory.grow(2 * ALIGNMENT), "there is room");
        assert_eq!((memory.len(), memory.as_ptr()), (3 * ALIGNMENT, start));
        assert_eq!(memory.to_vec(0, ALIGNMENT), [7; ALIGNMENT], "what is there stays");
        assert_eq!(memory.to_vec(ALIGNMENT, 2 * ALIGNMENT), [0; 2 * ALIGNMENT]);
        assert!(!memory.grow(4 * ALIGNMENT + 1), "there is no room");
        assert_eq!(memory.len(), 3 * ALIGNMENT);
        assert!(HostMemory::with_capacity(8, usize::MAX / 2).is_err());
    }

    #[test]
    fn untouched_pages_take_no_memory() {
        const BYTES: usize = 512 << 20;
        let before = resident_kib();
        let memory = HostMemory::new(BYTES);
        memory.write(BYTES / 2, &[1]);
        // Other tests run at the same time, in threads of this process.
        assert!(resident_kib() < before + (BYTES >> 10) / 2);
        assert_eq!(memory.to_vec(BYTES / 2, 1), [1]);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn touched_pages_are_resident() {
        const BYTES: usize = 256 << 20;
        let memory = HostMemory::new(BYTES);
        memory.write(BYTES / 2 + 5, &[1, 2, 3]);
        let before = resident_kib();
        assert!(memory.prefault());
        assert!(!memory.prefault());
        memory.touch(1..BYTES / 2);
        memory.touch(BYTES / 2..BYTES);
        // Other tests run at the same time, in threads of this process.
        assert!(resident_kib() > before + (BYTES >> 10) / 2);
        assert_eq!(memory.to_vec(BYTES / 2 + 4, 5), [0, 1, 2, 3, 0]);
        HostMemory::new(0).touch(0..0);
    }

    #[test]
    fn copies_over_several_blocks() {
        let size = 5 * ALIGNMENT + 3;
        for offset in [0, 1, 8, 255, 256, 257, 511] {
            for len in [0, 1, 7, 255, 256, 257, 600] {
                let memory = HostMemory::new(size);
                memory.write(0, &vec![9; size]);
                let bytes: Vec<u8> = (0..len).map(|i| (i % 251) as u8).collect();
                memory.write(offset, &bytes);
                let mut expected = vec![9; size];
                expected[offset..offset + len].copy_from_slice(&bytes);
                assert_eq!(memory.to_vec(0, size), expected, "{len} bytes at {offset}");
                assert_eq!(memory.to_vec(offset, len), bytes);
            }
        }
    }
}
