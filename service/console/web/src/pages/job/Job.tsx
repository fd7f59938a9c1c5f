export default function Job() { return <h1>Job</h1> }
