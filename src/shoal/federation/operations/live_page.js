// Replaces what changes on the page every SECONDS.
"use strict";
const SECONDS = 2;
const live = document.getElementById("live"), lost = document.getElementById("lost");
let last = new Date();
async function refresh() {
  try {
    const answer = await fetch("live", {cache: "no-store", signal: AbortSignal.timeout(5000)});
    if (!answer.ok) throw new Error(answer.status);
    const text = await answer.text();  // escaped by the coordinator
    if (text !== live.dataset.text) live.innerHTML = live.dataset.text = text;
    last = new Date();
    lost.hidden = true;
  } catch {
    lost.querySelector("time").textContent = last.toLocaleTimeString();
    lost.hidden = false;
  }
  setTimeout(refresh, SECONDS * 1000);
}
setTimeout(refresh, SECONDS * 1000);
