//! Which part of a host's memory holds what kernels read over the link, where each processor has a part of its own.

use memmap2::MmapMut;
use rayon::prelude::*;
use std::io;

/// How page-locked memory is spread over the parts of the host's memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Numa {
    /// As the driver does it.
    #[default]
    Off,
    /// Page by page over all parts.
    Interleave,
    /// In the part that the GPU is plugged into.
    Bind,
}

/// Parts of the host's memory and how they are used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Nodes {
    numa: Numa,
    nodes: Vec<usize>,
}

impl Nodes {
    /// For a device at such an address of the bus; none if that is left to the driver. What the system does not allow is an error.
    pub fn new(numa: Numa, bus_id: &str) -> io::Result<Option<Self>> {
        let read = |path: String| std::fs::read_to_string(path).map(|text| text.trim().to_string());
        let nodes = match numa {
            Numa::Off => return Ok(None),
            Numa::Interleave => list(&read("/sys/devices/system/node/online".into())?),
            // A system with one part calls it -1.
            Numa::Bind => list(&read(format!("/sys/bus/pci/devices/{}/numa_node", bus_id.to_lowercase()))?.replace("-1", "0")),
        };
        let nodes = Self { numa, nodes: nodes.ok_or(io::ErrorKind::InvalidData)? };
        Region::new(1, &nodes)?;
        Ok(Some(nodes))
    }
}

/// Numbers as the system lists them, e.g. `0-3,8`.
fn list(text: &str) -> Option<Vec<usize>> {
    let mut all = Vec::new();
    for part in text.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        all.extend(first.parse().ok()?..=last.parse::<usize>().ok()?);
    }
    Some(all)
}

/// Memory of some parts, in huge pages where there are any, of which every page is there.
pub(super) struct Region(MmapMut);

/// A huge page.
const HUGE_BYTES: usize = 2 << 20;
/// Pages that one thread asks for.
const TOUCH_BYTES: usize = 64 << 20;

impl Region {
    /// Allocates.
    pub fn new(bytes: usize, nodes: &Nodes) -> io::Result<Self> {
        let mut map = MmapMut::map_anon(bytes.next_multiple_of(HUGE_BYTES))?;
        #[cfg(target_os = "linux")]
        {
            // Without huge pages it works as well.
            map.advise(memmap2::Advice::HugePage).ok();
            bind(&mut map, nodes)?;
        }
        #[cfg(not(target_os = "linux"))]
        if nodes.numa != Numa::Off {
            return Err(io::ErrorKind::Unsupported.into());
        }
        map.par_chunks_mut(TOUCH_BYTES).for_each(|part| part.iter_mut().step_by(4096).for_each(|byte| *byte = 0));
        Ok(Self(map))
    }

    /// The bytes.
    pub fn as_mut(&mut self) -> &mut [u8] {
        &mut self.0
    }

    /// The bytes.
    pub fn as_slice(&self) -> &[u8] {
        &self.0
    }
}

#[cfg(target_os = "linux")]
fn bind(map: &mut MmapMut, nodes: &Nodes) -> io::Result<()> {
    const BITS: usize = u64::BITS as usize;
    let mode = if nodes.numa == Numa::Bind { libc::MPOL_BIND } else { libc::MPOL_INTERLEAVE };
    let mut mask = vec![0u64; nodes.nodes.iter().max().map_or(1, |n| n / BITS + 1)];
    nodes.nodes.iter().for_each(|n| mask[n / BITS] |= 1 << (n % BITS));
    // The system counts one bit more than it reads.
    let bits = mask.len() * BITS + 1;
    // SAFETY: the range is the map's, the mask has as many bits as are said, and where pages lie changes none of their bytes.
    let done = unsafe { libc::syscall(libc::SYS_mbind, map.as_mut_ptr(), map.len(), mode, mask.as_ptr(), bits, 0) };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_read_as_the_system_writes_them() {
        assert_eq!(list("0"), Some(vec![0]));
        assert_eq!(list("0-2,5,7-8"), Some(vec![0, 1, 2, 5, 7, 8]));
        assert_eq!(list("all"), None);
    }

    /// Part 0 is there on every system; where asking for it is forbidden, that is an error and no crash.
    #[test]
    fn memory_is_zero_and_can_be_written() {
        for numa in [Numa::Interleave, Numa::Bind] {
            match Region::new(5 << 20, &Nodes { numa, nodes: vec![0] }) {
                Ok(mut region) => {
                    assert!(region.as_slice().len() >= 5 << 20 && region.as_slice().iter().all(|&b| b == 0));
                    region.as_mut().fill(7);
                }
                Err(error) => assert!(error.raw_os_error().is_some(), "{error}"),
            }
        }
        #[cfg(target_os = "linux")]
        assert!(Region::new(1, &Nodes { numa: Numa::Bind, nodes: vec![1000] }).is_err(), "there is no such part");
    }
}
