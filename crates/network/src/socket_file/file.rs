//! Files in memory without a name, and their transfer to another process.

use std::fs::File;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;

use rustix::fs::{
    FallocateFlags, MemfdFlags, SealFlags, fallocate, fcntl_add_seals, fcntl_get_seals,
    memfd_create,
};
use rustix::io::retry_on_intr;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

/// Creates a file of zeros that no process can truncate or extend. All of its memory is allocated at once, so a system
/// without enough memory refuses the file now, and does not kill a process later.
pub(super) fn create(bytes: u64) -> io::Result<File> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let create = |flags| memfd_create("flambeau connection", flags);
    // Some systems refuse files that could be executed. Older ones do not know the flag.
    let created = create(flags | MemfdFlags::NOEXEC_SEAL).or_else(|_| create(flags));
    let file = File::from(created?);
    retry_on_intr(|| fallocate(&file, FallocateFlags::empty(), 0, bytes))?;
    let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    fcntl_add_seals(&file, seals)?;
    Ok(file)
}

/// Refuses a file that is not in memory, has another size, is not allocated, or could be truncated or extended. Access
/// to truncated memory would kill this process.
pub(super) fn check(file: &File, bytes: u64) -> io::Result<()> {
    /// The size of the blocks in which the system counts a file's memory, in bytes.
    const BLOCK: u64 = 512;
    let seals = SealFlags::SHRINK | SealFlags::GROW;
    if fcntl_get_seals(file).is_ok_and(|found| found.contains(seals)) {
        let found = file.metadata()?;
        if found.len() == bytes && found.blocks() * BLOCK >= bytes {
            return Ok(());
        }
    }
    Err(io::Error::new(
        io::ErrorKind::InvalidData,
        "the caller shares memory of an unknown kind; use the same release everywhere",
    ))
}

/// Sends a few bytes, and a file with them.
pub(super) fn send(socket: impl AsFd, bytes: &[u8], file: &File) -> io::Result<()> {
    let files = [file.as_fd()];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    control.push(SendAncillaryMessage::ScmRights(&files));
    let bytes = [IoSlice::new(bytes)];
    // A few bytes are sent as a whole.
    sendmsg(socket, &bytes, &mut control, SendFlags::NOSIGNAL)?;
    Ok(())
}

/// Receives bytes, and the file if one comes with them.
pub(super) fn receive(socket: impl AsFd, bytes: &mut [u8]) -> io::Result<(usize, Option<File>)> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut into = [IoSliceMut::new(bytes)];
    let received = recvmsg(socket, &mut into, &mut control, RecvFlags::CMSG_CLOEXEC)?;
    let files = control.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(files) => Some(files),
        _ => None,
    });
    Ok((received.bytes, files.flatten().last().map(File::from)))
}
