//! Physical memory of the machine: its size, and large pages.
//!
//! The system provides memory page by page, with a page fault for every 4 KiB. The faults take longer than filling the
//! pages, and the pages later need more entries than the translation lookaside buffer has. Systems have larger pages on
//! request.

/// Size of a large page in bytes. A request covers whole large pages only.
#[cfg(target_os = "linux")]
const LARGE_PAGE_BYTES: usize = 2 << 20;

/// Requests large pages for memory that was not touched yet. Contents do not change, and the call has no effect on
/// systems without large pages. Only whole large pages inside of the region count, so the region takes no more memory
/// with them.
pub fn prefer_large_pages(start: *mut u8, bytes: usize) {
    #[cfg(target_os = "linux")]
    {
        let skip = start.align_offset(LARGE_PAGE_BYTES);
        let Some(large_len) = bytes.checked_sub(skip).map(|rest| rest / LARGE_PAGE_BYTES * LARGE_PAGE_BYTES)
        else {
            return;
        };
        if large_len > 0 {
            // SAFETY: the advice changes neither contents nor protection, for any region. The system rejects a region
            // that does not belong to this process, and the rejection is ignored.
            let _ = unsafe { libc::madvise(start.wrapping_add(skip).cast(), large_len, libc::MADV_HUGEPAGE) };
        }
    }
    #[cfg(not(target_os = "linux"))]
    let _ = (start, bytes);
}

/// Returns the size of the machine's memory in bytes; `None` if the system does not report it.
#[must_use]
pub fn memory_bytes() -> Option<u64> {
    #[cfg(unix)]
    {
        // SAFETY: both calls read numbers of the system.
        let (pages, size) =
            unsafe { (libc::sysconf(libc::_SC_PHYS_PAGES), libc::sysconf(libc::_SC_PAGESIZE)) };
        u64::try_from(pages).ok()?.checked_mul(u64::try_from(size).ok()?)
    }
    #[cfg(not(unix))]
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg(unix)]
    fn memory_size_is_known() {
        assert!(memory_bytes().is_some_and(|bytes| bytes > 1 << 20));
    }

    #[test]
    fn large_pages_keep_the_contents_of_any_region() {
        let mut bytes: Vec<u8> = (0..8 << 20).map(|i| (i % 251) as u8).collect();
        let start = bytes.as_mut_ptr();
        for (skip, len) in [(0, 8 << 20), (1, 5 << 20), (4097, 2 << 20), (3, 7), (0, 0)] {
            prefer_large_pages(start.wrapping_add(skip), len);
        }
        prefer_large_pages(std::ptr::null_mut(), 8 << 20);
        assert!(bytes.iter().enumerate().all(|(i, &byte)| byte == (i % 251) as u8));
    }
}
